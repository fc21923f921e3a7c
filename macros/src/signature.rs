//! Checks a handler's signature, and explains mistakes.

use syn::spanned::Spanned;
use syn::{FnArg, Safety, Signature, Type};

use crate::options::HandlerOptions;

/// The types of a handler's arguments.
pub(crate) struct Arguments<'a> {
    pub(crate) payload: &'a Type,
    pub(crate) context: Option<&'a Type>,
}

pub(crate) fn check<'a>(
    signature: &'a Signature,
    options: &HandlerOptions,
) -> syn::Result<Arguments<'a>> {
    check_asyncness(signature, options)?;
    check_safety(signature)?;
    check_generics(signature)?;
    check_arguments(signature)
}

fn check_asyncness(signature: &Signature, options: &HandlerOptions) -> syn::Result<()> {
    match (&signature.asyncness, options.blocking) {
        (None, None) => Err(syn::Error::new(
            signature.fn_token.span(),
            "a task handler is an `async fn`: add `async`, or `#[task(blocking)]` to run this function off the async threads",
        )),
        (Some(_), Some(blocking)) => Err(syn::Error::new(
            blocking,
            "`blocking` is for a plain `fn`: remove it, or the function's `async`",
        )),
        _ => Ok(()),
    }
}

fn check_safety(signature: &Signature) -> syn::Result<()> {
    match &signature.safety {
        Safety::Unsafe(unsafety) => Err(syn::Error::new(
            unsafety.span(),
            "a task handler is a safe function: the worker cannot know what must hold before the call",
        )),
        _ => Ok(()),
    }
}

fn check_generics(signature: &Signature) -> syn::Result<()> {
    if signature.generics.params.is_empty() {
        return Ok(());
    }
    Err(syn::Error::new_spanned(
        &signature.generics,
        "a task handler cannot be generic: it handles one payload type, which owns its values",
    ))
}

fn check_arguments(signature: &Signature) -> syn::Result<Arguments<'_>> {
    let mut types = Vec::new();
    for argument in &signature.inputs {
        match argument {
            FnArg::Typed(argument) => types.push(&*argument.ty),
            FnArg::Receiver(receiver) => {
                return Err(syn::Error::new_spanned(
                    receiver,
                    "a task handler is a free function, without `self`: take what it needs from `Context::data`",
                ));
            }
        }
    }
    let (payload, context) = match types[..] {
        [] => return Err(missing_payload(signature.ident.span())),
        [only] if is_named_context(only) => return Err(missing_payload(only.span())),
        [only] => (only, None),
        [first, _] if is_named_context(first) => {
            return Err(syn::Error::new_spanned(
                first,
                "the payload comes first, the context second: swap the arguments",
            ));
        }
        [first, second] => (first, Some(second)),
        [_, _, third, ..] => {
            return Err(syn::Error::new_spanned(
                third,
                "a task handler takes one payload, and the context: put all other values into the payload's struct",
            ));
        }
    };
    if let Some(context @ Type::ImplTrait(_)) = context {
        return Err(syn::Error::new_spanned(
            context,
            "a task handler cannot be generic: the second argument is `Context`",
        ));
    }
    match payload {
        Type::Reference(reference) => Err(syn::Error::new_spanned(
            reference,
            "a task handler owns its payload: remove the `&`",
        )),
        Type::ImplTrait(abstraction) => Err(syn::Error::new_spanned(
            abstraction,
            "a task handler cannot be generic: name the payload's type",
        )),
        Type::Tuple(_) | Type::Array(_) => Err(syn::Error::new_spanned(
            payload,
            "the payload is a type of your own, since one type stands for one task: put the values into a struct, \
             and derive `Serialize` and `Deserialize` for it",
        )),
        _ => Ok(Arguments { payload, context }),
    }
}

fn missing_payload(span: proc_macro2::Span) -> syn::Error {
    syn::Error::new(
        span,
        "a task handler takes its payload as the first argument, such as `async fn send_otp(otp: SendOtp)`; \
         a task that needs no values has an empty struct",
    )
}

/// A guess by the name alone, for better messages; the compiler checks the type itself.
fn is_named_context(argument: &Type) -> bool {
    matches!(argument, Type::Path(path) if path.path.segments.last().is_some_and(|last| last.ident == "Context"))
}
