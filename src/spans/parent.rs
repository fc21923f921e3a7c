//! The W3C trace context, as messages carry it. Pure.

use opentelemetry::trace::{SpanContext, SpanId, TraceFlags, TraceId, TraceState};

/// The span that a `traceparent` names. `None`: it names none.
pub(super) fn parse(traceparent: &str) -> Option<SpanContext> {
    let mut fields = traceparent.trim().split('-');
    let (version, trace, span, flags) = (
        fields.next()?,
        fields.next()?,
        fields.next()?,
        fields.next()?,
    );
    let is_hex = |text: &str, length: usize| {
        text.len() == length
            && text
                .bytes()
                .all(|it| matches!(it, b'0'..=b'9' | b'a'..=b'f'))
    };
    let is_known = version == "00" && fields.next().is_none();
    let is_later = is_hex(version, 2) && version != "ff" && version != "00";
    if !(is_known || is_later) || !is_hex(trace, 32) || !is_hex(span, 16) || !is_hex(flags, 2) {
        return None;
    }
    let flags = u8::from_str_radix(flags, 16).ok()?;
    let context = SpanContext::new(
        TraceId::from_hex(trace).ok()?,
        SpanId::from_hex(span).ok()?,
        // Of the flags of later versions nothing is known.
        TraceFlags::new(flags) & TraceFlags::SAMPLED,
        true,
        TraceState::NONE,
    );
    context.is_valid().then_some(context)
}

/// The `traceparent` of a span. `None`: nothing records spans, and this is none.
pub(super) fn write(context: &SpanContext) -> Option<String> {
    context.is_valid().then(|| {
        let (trace, span) = (context.trace_id(), context.span_id());
        let flags = context.trace_flags() & TraceFlags::SAMPLED;
        format!("00-{trace:032x}-{span:016x}-{flags:02x}")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trace_context_is_read_as_it_is_written() {
        for flags in ["00", "01"] {
            let text = format!("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-{flags}");
            let context = parse(&text).unwrap();
            assert!(context.is_remote() && context.is_sampled() == (flags == "01"));
            assert_eq!(write(&context).as_deref(), Some(text.as_str()));
        }
    }

    #[test]
    fn a_text_that_is_no_trace_context_is_none() {
        for text in [
            "",
            "00-1-2-01",
            "00-00000000000000000000000000000000-b7ad6b7169203331-01",
            "00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01",
            "00-0AF7651916CD43DD8448EB211C80319C-b7ad6b7169203331-01",
            "ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-more",
            "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-é",
        ] {
            assert!(parse(text).is_none(), "{text}");
        }
        assert!(write(&SpanContext::NONE).is_none());
        let later = "01-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-more";
        assert!(parse(later).is_some());
    }
}
