//! Generates the code of the macros.

use proc_macro2::{Delimiter, Span, TokenStream, TokenTree};
use quote::{ToTokens, quote, quote_spanned};
use syn::spanned::Spanned;
use syn::{Attribute, DeriveInput, Ident, ItemFn, LitStr, Path, ReturnType, Signature, Type};

use crate::name::uniqueness_guard;
use crate::options::{ContractOptions, HandlerOptions};
use crate::signature::{self, Arguments};

/// `#[task(…)] async fn …`: the function unchanged, and its registration.
pub(crate) fn handler(options: TokenStream, function: TokenStream) -> TokenStream {
    let registration =
        register(options, function.clone()).unwrap_or_else(syn::Error::into_compile_error);
    quote! {
        #function
        #registration
    }
}

fn register(options: TokenStream, function: TokenStream) -> syn::Result<TokenStream> {
    let function: ItemFn = match syn::parse2(function.clone()) {
        Ok(function) => function,
        // The compiler reports errors of the function itself better.
        Err(_) if is_function_with_body(&function) => return Ok(TokenStream::new()),
        Err(_) => {
            return Err(syn::Error::new(
                function.into_iter().next().span(),
                "`#[task]` goes on an async function; on a payload type, use `#[derive(Task)]`",
            ));
        }
    };
    let options = HandlerOptions::parse(options)?;
    let arguments = signature::check(&function.sig, &options)?;

    let conditions = conditions(&function.attrs);
    let contract = options
        .name
        .as_ref()
        .map(|name| implement(&options.library, name, arguments.payload, &conditions));
    let submission = submit(&options, &arguments, &function.sig);
    Ok(quote! {
        #contract
        #(#conditions)*
        #submission
    })
}

fn is_function_with_body(item: &TokenStream) -> bool {
    let tokens: Vec<TokenTree> = item.clone().into_iter().collect();
    let is_function = |token: &TokenTree| matches!(token, TokenTree::Ident(word) if word == "fn");
    let is_body = |token: &TokenTree| matches!(token, TokenTree::Group(group) if group.delimiter() == Delimiter::Brace);
    tokens.iter().any(is_function) && tokens.last().is_some_and(is_body)
}

fn submit(
    options: &HandlerOptions,
    arguments: &Arguments<'_>,
    signature: &Signature,
) -> TokenStream {
    let HandlerOptions {
        library, setters, ..
    } = options;
    let payload = arguments.payload;
    let running = run(options, arguments, signature);
    // With the function's span on every token, the recorded place is the function's line.
    let span = signature.ident.span();
    let located = respan(library, span);
    let payload_name = local("payload", span);
    let context = match arguments.context {
        Some(_) => local("context", span).into_token_stream(),
        None => quote!(_),
    };
    let registration = quote_spanned! {span=>
        #located::__private::registration::<#payload>(
            |#payload_name, #context| #running,
            #located::TaskOptions::new()#setters,
        )
    };
    quote! {
        #library::__private::inventory::submit! {
            #library::__private::Collected(|| #registration)
        }
    }
}

/// The call of the handler. Its spans make the compiler point at the mistake: the
/// second argument's type, or the return type.
fn run(options: &HandlerOptions, arguments: &Arguments<'_>, signature: &Signature) -> TokenStream {
    let library = &options.library;
    let context = arguments.context.map(|context| {
        let name = local("context", context.span());
        quote_spanned! {context.span()=>
            <#context as #library::__private::SecondArgument>::from_context(#name)
        }
    });
    let span = match &signature.output {
        ReturnType::Type(_, returned) => returned.span(),
        ReturnType::Default => signature.ident.span(),
    };
    let library = respan(library, span);
    let mut handler = signature.ident.clone();
    handler.set_span(span);
    let payload = local("payload", span);
    let call = quote_spanned!(span=> #handler(#payload, #context));
    match options.blocking {
        None => quote_spanned!(span=> #library::__private::run(#call)),
        Some(_) => quote_spanned!(span=> #library::__private::run_blocking(move || #call)),
    }
}

/// A variable of the expansion. It is the same one wherever it is, also where the function comes from another macro and its
/// parts from different places.
fn local(name: &str, place: Span) -> Ident {
    Ident::new(name, Span::mixed_site().located_at(place))
}

fn respan(path: &Path, span: Span) -> TokenStream {
    let with_span = |mut token: TokenTree| {
        token.set_span(span);
        token
    };
    path.to_token_stream().into_iter().map(with_span).collect()
}

/// `#[derive(Task)] #[task(name = "…")]`.
pub(crate) fn contract(input: TokenStream) -> TokenStream {
    implement_contract(input).unwrap_or_else(syn::Error::into_compile_error)
}

fn implement_contract(input: TokenStream) -> syn::Result<TokenStream> {
    let input: DeriveInput = syn::parse2(input)?;
    if !input.generics.params.is_empty() {
        return Err(syn::Error::new_spanned(
            &input.generics,
            "the payload of a task cannot be generic: one name stands for one type, which owns its values",
        ));
    }
    let missing = || {
        let message = format!(
            "name the task: add `#[task(name = \"…\")]` to `{}`",
            input.ident
        );
        syn::Error::new(input.ident.span(), message)
    };
    let mut attributes = input
        .attrs
        .iter()
        .filter(|attribute| attribute.path().is_ident("task"));
    let attribute = attributes.next().ok_or_else(missing)?;
    if let Some(second) = attributes.next() {
        return Err(syn::Error::new_spanned(
            second,
            "a payload has one `#[task(…)]`: one type stands for one task",
        ));
    }
    let options = ContractOptions::parse(attribute.meta.require_list()?.tokens.clone())?;
    let name = options.name.as_ref().ok_or_else(missing)?;
    let ident = &input.ident;
    let payload = syn::parse_quote!(#ident);
    Ok(implement(
        &options.library,
        name,
        &payload,
        &conditions(&input.attrs),
    ))
}

fn implement(
    library: &Path,
    name: &LitStr,
    payload: &Type,
    conditions: &[&Attribute],
) -> TokenStream {
    let guard = uniqueness_guard(name);
    // With the payload's span, the compiler points at a payload without serde.
    let implementation = quote_spanned! {payload.span()=>
        #[automatically_derived]
        impl #library::Task for #payload {
            const NAME: &'static str = #name;
        }
    };
    quote! {
        #(#conditions)*
        #guard
        #(#conditions)*
        #implementation
    }
}

/// The `#[cfg]`s that the compiler has not evaluated yet: generated code must not name an item that they remove.
fn conditions(attributes: &[Attribute]) -> Vec<&Attribute> {
    attributes
        .iter()
        .filter(|attribute| attribute.path().is_ident("cfg"))
        .collect()
}
