//! Families of metrics as OpenMetrics text. A family without samples is left out.

use std::fmt;

use prometheus_client::encoding::{
    DescriptorEncoder, EncodeGaugeValue, EncodeLabelSet, MetricEncoder, NoLabelSet,
};
use prometheus_client::metrics::MetricType;

use super::histogram::Read;

/// Names and values of labels.
pub(super) type Labels<'a, const N: usize> = [(&'a str, &'a str); N];

/// `name` is without `_total`, which the format adds.
pub(super) fn counters<S: EncodeLabelSet>(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    samples: impl IntoIterator<Item = (S, u64)>,
) -> fmt::Result {
    let kind = MetricType::Counter;
    family(encoder, name, help, kind, samples, |mut encoder, count| {
        encoder.encode_counter::<NoLabelSet, u64, u64>(&count, None)
    })
}

pub(super) fn gauges<S: EncodeLabelSet, V: EncodeGaugeValue>(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    samples: impl IntoIterator<Item = (S, V)>,
) -> fmt::Result {
    let kind = MetricType::Gauge;
    family(encoder, name, help, kind, samples, |mut encoder, value| {
        encoder.encode_gauge(&value)
    })
}

pub(super) fn histograms<S: EncodeLabelSet>(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    samples: impl IntoIterator<Item = (S, Read)>,
) -> fmt::Result {
    let kind = MetricType::Histogram;
    family(encoder, name, help, kind, samples, |mut encoder, read| {
        encoder.encode_histogram::<NoLabelSet>(read.sum, read.count, &read.buckets, None)
    })
}

/// One without labels.
pub(super) fn gauge(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    value: impl EncodeGaugeValue,
) -> fmt::Result {
    let mut encoder = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
    encoder.encode_gauge(&value)
}

/// One without labels. It is left out as long as it is empty.
pub(super) fn histogram(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    read: Read,
) -> fmt::Result {
    let mut encoder = encoder.encode_descriptor(name, help, None, MetricType::Histogram)?;
    encoder.encode_histogram::<NoLabelSet>(read.sum, read.count, &read.buckets, None)
}

fn family<S: EncodeLabelSet, V>(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    kind: MetricType,
    samples: impl IntoIterator<Item = (S, V)>,
    encode: impl Fn(MetricEncoder<'_>, V) -> fmt::Result,
) -> fmt::Result {
    let mut samples = samples.into_iter().peekable();
    if samples.peek().is_none() {
        return Ok(());
    }
    let mut family = encoder.encode_descriptor(name, help, None, kind)?;
    for (labels, value) in samples {
        encode(family.encode_family(&labels)?, value)?;
    }
    Ok(())
}
