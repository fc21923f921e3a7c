//! Parses the options in `#[task(…)]`.

use std::time::Duration;

use proc_macro2::{Span, TokenStream};
use quote::quote;
use syn::ext::IdentExt;
use syn::parse::{Parse, ParseStream, Parser};
use syn::punctuated::Punctuated;
use syn::{Ident, Lit, LitBool, LitInt, LitStr, Path, Token};

use crate::name;

const HANDLER_OPTIONS: &str =
    "name, retries, backoff, backoff_max, jitter, timeout, soft_timeout, blocking, crate";

/// The default of `TaskOptions::new`; the registry checks again.
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(360);
const DEFAULT_BACKOFF_MAX: Duration = Duration::from_secs(600);

/// The options of a handler.
pub(crate) struct HandlerOptions {
    pub(crate) name: Option<LitStr>,
    pub(crate) blocking: Option<Span>,
    pub(crate) library: Path,
    /// The calls that set the given options.
    pub(crate) setters: TokenStream,
}

impl HandlerOptions {
    pub(crate) fn parse(tokens: TokenStream) -> syn::Result<Self> {
        let mut options = Self {
            name: None,
            blocking: None,
            library: default_library(),
            setters: TokenStream::new(),
        };
        let mut timeout = DEFAULT_TIMEOUT;
        let mut soft_timeout = None;
        let mut backoff = None;
        let mut backoff_max = DEFAULT_BACKOFF_MAX;
        for option in parse_list(tokens)? {
            let key = &option.key;
            match key.to_string().as_str() {
                "name" => options.name = Some(option.task_name()?),
                "crate" => options.library = option.path()?,
                "blocking" => options.blocking = Some(option.flag()?),
                "retries" => {
                    let retries = option.number()?;
                    options.setters.extend(quote!(.#key(#retries)));
                }
                "jitter" => {
                    let jitter = option.boolean()?;
                    options.setters.extend(quote!(.#key(#jitter)));
                }
                "backoff" | "backoff_max" | "timeout" | "soft_timeout" => {
                    let duration = option.duration()?;
                    match key.to_string().as_str() {
                        "timeout" => timeout = duration,
                        "soft_timeout" => soft_timeout = Some((duration, key.span())),
                        "backoff" => backoff = Some((duration, key.span())),
                        _ => backoff_max = duration,
                    }
                    let (seconds, nanoseconds) = (duration.as_secs(), duration.subsec_nanos());
                    options
                        .setters
                        .extend(quote!(.#key(::core::time::Duration::new(#seconds, #nanoseconds))));
                }
                _ => return Err(option.unknown(HANDLER_OPTIONS)),
            }
        }
        if let Some((soft, span)) = soft_timeout
            && soft >= timeout
        {
            return Err(syn::Error::new(
                span,
                "`soft_timeout` must be shorter than `timeout` (6m unless given), so that the handler has time left to end well",
            ));
        }
        if let Some((backoff, span)) = backoff
            && backoff > backoff_max
        {
            return Err(syn::Error::new(
                span,
                "`backoff` is longer than `backoff_max` (10m unless given), which would cut it: raise `backoff_max`, or shorten `backoff`",
            ));
        }
        Ok(options)
    }
}

/// The options of a contract.
pub(crate) struct ContractOptions {
    pub(crate) name: Option<LitStr>,
    pub(crate) library: Path,
}

impl ContractOptions {
    pub(crate) fn parse(tokens: TokenStream) -> syn::Result<Self> {
        let mut options = Self {
            name: None,
            library: default_library(),
        };
        for option in parse_list(tokens)? {
            match option.key.to_string().as_str() {
                "name" => options.name = Some(option.task_name()?),
                "crate" => options.library = option.path()?,
                _ => return Err(option.unknown("name, crate (the others belong to the handler)")),
            }
        }
        Ok(options)
    }
}

fn default_library() -> Path {
    syn::parse_quote!(::tierline)
}

fn parse_list(tokens: TokenStream) -> syn::Result<Vec<TaskOption>> {
    let list = Punctuated::<TaskOption, Token![,]>::parse_terminated.parse2(tokens)?;
    let options: Vec<TaskOption> = list.into_iter().collect();
    for (index, option) in options.iter().enumerate() {
        if options[..index]
            .iter()
            .any(|earlier| earlier.key == option.key)
        {
            let message = format!("`{}` is given twice: remove one of them", option.key);
            return Err(syn::Error::new(option.key.span(), message));
        }
    }
    Ok(options)
}

/// `key` or `key = value`.
struct TaskOption {
    key: Ident,
    value: Option<syn::Expr>,
}

impl Parse for TaskOption {
    fn parse(input: ParseStream<'_>) -> syn::Result<Self> {
        if input.peek(Lit) {
            return Err(input
                .error("an option is written `key = value`, such as `name = \"email.send_otp\"`"));
        }
        let key = input.call(Ident::parse_any)?.unraw();
        let value = if input.parse::<Option<Token![=]>>()?.is_some() {
            Some(input.parse()?)
        } else {
            None
        };
        if !input.is_empty() && !input.peek(Token![,]) {
            let message =
                format!("expected a comma after `{key}`; its value is written `{key} = …`");
            return Err(input.error(message));
        }
        Ok(Self { key, value })
    }
}

impl TaskOption {
    fn task_name(&self) -> syn::Result<LitStr> {
        let name = self.text("\"email.send_otp\"")?;
        name::check(&name)?;
        Ok(name)
    }

    fn path(&self) -> syn::Result<Path> {
        self.text("\"path::to::tierline\"")?.parse()
    }

    fn flag(&self) -> syn::Result<Span> {
        match &self.value {
            None => Ok(self.key.span()),
            Some(_) => Err(self.expected(&format!("`{}` alone, without a value", self.key))),
        }
    }

    fn number(&self) -> syn::Result<u32> {
        let number = match self.literal() {
            Some(Lit::Int(number)) => LitInt::base10_parse(number).ok(),
            _ => None,
        };
        number.ok_or_else(|| {
            let wanted = format!(
                "a whole number up to {}, such as `{} = 5`",
                u32::MAX,
                self.key
            );
            self.expected(&wanted)
        })
    }

    fn boolean(&self) -> syn::Result<bool> {
        match self.literal() {
            Some(Lit::Bool(LitBool { value, .. })) => Ok(*value),
            _ => Err(self.expected(&format!("`{0} = true` or `{0} = false`", self.key))),
        }
    }

    fn duration(&self) -> syn::Result<Duration> {
        let text = self.text("\"20s\"")?;
        let refused = |problem: &str| {
            let message = format!(
                "{:?} is not a duration ({problem}): write a number with ms, s, m, h or d, such as `{} = \"20s\"`",
                text.value(),
                self.key
            );
            Err(syn::Error::new(text.span(), message))
        };
        let may_be_zero = self.key != "timeout" && self.key != "soft_timeout";
        match parse_duration(&text.value()) {
            Ok(duration) if duration.is_zero() && !may_be_zero => {
                refused("no handler ends in no time")
            }
            Ok(duration) => Ok(duration),
            Err(problem) => refused(&problem),
        }
    }

    fn text(&self, example: &str) -> syn::Result<LitStr> {
        match self.literal() {
            Some(Lit::Str(text)) => Ok(text.clone()),
            _ => Err(self.expected(&format!(
                "text in quotes, such as `{} = {example}`",
                self.key
            ))),
        }
    }

    fn literal(&self) -> Option<&Lit> {
        let mut value = self.value.as_ref()?;
        // A value that a `macro_rules!` passes on is in an invisible group.
        while let syn::Expr::Group(group) = value {
            value = &group.expr;
        }
        match value {
            syn::Expr::Lit(literal) => Some(&literal.lit),
            _ => None,
        }
    }

    fn expected(&self, wanted: &str) -> syn::Error {
        let message = format!("expected {wanted}");
        match &self.value {
            Some(value) => syn::Error::new_spanned(value, message),
            None => syn::Error::new(self.key.span(), message),
        }
    }

    fn unknown(&self, known: &str) -> syn::Error {
        let message = format!("unknown option `{}`: the options are {known}", self.key);
        syn::Error::new(self.key.span(), message)
    }
}

/// The durations that the library reads; both have the same tests.
fn parse_duration(text: &str) -> Result<Duration, String> {
    let is_number = |character: char| character.is_ascii_digit() || character == '.';
    let words: Vec<&str> = text.split_whitespace().collect();
    let mut pairs = words.windows(2);
    // "5 0s" would be 50 seconds.
    if pairs.any(|pair| pair[0].ends_with(is_number) && pair[1].starts_with(is_number)) {
        return Err("there is a space within a number".to_owned());
    }
    let mut units = text.split(|character: char| !character.is_alphabetic());
    if units.any(|unit| unit == "M" || unit.starts_with("mon") || unit.starts_with('y')) {
        return Err("months and years have no fixed length".to_owned());
    }
    humantime::parse_duration(text).map_err(|error| match error {
        humantime::DurationError::UnknownUnit { unit, .. } if !unit.is_empty() => {
            format!("{unit:?} is no unit")
        }
        humantime::DurationError::UnknownUnit { .. } => "the unit is missing".to_owned(),
        _ => "it cannot be read".to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_those_of_the_library() {
        let lines = include_str!("../../tests/durations.txt").lines();
        for line in lines.filter(|line| !line.starts_with('#')) {
            let Some((milliseconds, text)) = line.split_once(' ') else {
                panic!("{line:?} has no text")
            };
            let expected = milliseconds.parse().ok().map(Duration::from_millis);
            assert_eq!(parse_duration(text.trim_start()).ok(), expected, "{line:?}");
        }
    }
}
