//! Bars as SVG.

use std::fmt::Write;

use serde_json::Value;

const MARGIN: f64 = 16.0;
/// Below title and legend.
const TOP: f64 = 68.0;
const ROW: f64 = 28.0;
const THICKNESS: f64 = 16.0;
const LONGEST_BAR: f64 = 420.0;
/// Beside the longest bar, for its figure.
const FIGURES: f64 = 90.0;
/// About as wide as a letter is. Nothing here can measure text.
const LETTER: f64 = 7.2;
const TITLE_LETTER: f64 = 9.0;

const INK: &str = "#1f2328";
const FAINT_INK: &str = "#59636e";
const OWN_BAR: &str = "#d9822b";
const OTHER_BAR: &str = "#9db2c8";

/// A bar for each contender, with a thin line over the figures that it had.
#[derive(Debug, Clone)]
pub struct Chart {
    title: String,
    legend: String,
    bars: Vec<Bar>,
}

#[derive(Debug, Clone)]
struct Bar {
    name: String,
    /// Not a number where there is none, as all of these.
    median: f64,
    from: f64,
    to: f64,
}

impl Chart {
    /// The chart of a part of a report; `None` for those that do not compare.
    pub fn of(section: &Value) -> Option<Self> {
        let unit = section["unit"].as_str().unwrap_or_default();
        let contenders = section["contenders"].as_array();
        let (legend, bars) = match contenders {
            Some(contenders) => (
                format!("{unit}: the median, and a line from the least to the most"),
                bars(contenders, "contender", ["median", "min", "max"]),
            ),
            None => (
                "milliseconds: the median, and a line to the 99th percentile".to_owned(),
                bars(
                    section["rows"].as_array()?,
                    "name",
                    ["p50_ms", "p50_ms", "p99_ms"],
                ),
            ),
        };
        Some(Self {
            title: section["title"].as_str()?.to_owned(),
            legend,
            bars,
        })
    }

    /// What it shows.
    pub fn title(&self) -> &str {
        &self.title
    }

    /// The title in lower case, with hyphens for all that is neither letter nor digit.
    pub fn file_name(&self) -> String {
        let lower = self.title.to_lowercase();
        let words = lower.split(|letter: char| !letter.is_ascii_alphanumeric());
        let words: Vec<_> = words.filter(|word| !word.is_empty()).collect();
        format!("{}.svg", words.join("-"))
    }

    /// The chart, on a white ground of its own: the page that shows it may be dark.
    pub fn to_svg(&self) -> String {
        let longest = self.bars.iter().map(|bar| bar.name.chars().count()).max();
        let left = MARGIN + longest.unwrap_or(0) as f64 * LETTER + 10.0;
        let width = (left + LONGEST_BAR + FIGURES + MARGIN)
            .max(self.title.chars().count() as f64 * TITLE_LETTER + 2.0 * MARGIN)
            .ceil();
        let height = TOP + self.bars.len() as f64 * ROW + MARGIN;
        let title = escape(&self.title);
        let mut svg = format!(
            r##"<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img" font-family="system-ui, sans-serif" font-size="13">
<title>{title}</title>
<rect width="{width}" height="{height}" fill="#ffffff"/>
<text x="{MARGIN}" y="28" font-size="16" font-weight="600" fill="{INK}">{title}</text>
<text x="{MARGIN}" y="48" fill="{FAINT_INK}">{}</text>
"##,
            escape(&self.legend)
        );
        let scale = LONGEST_BAR / self.most();
        for (row, bar) in self.bars.iter().enumerate() {
            let middle = TOP + (row as f64 + 0.5) * ROW;
            bar.draw(&mut svg, left, middle, scale);
        }
        svg + "</svg>\n"
    }

    /// The figure that is as long as a bar may be.
    fn most(&self) -> f64 {
        let figures = self.bars.iter().flat_map(|bar| [bar.median, bar.to]);
        let most = figures.filter(|it| it.is_finite()).fold(0.0, f64::max);
        if most > 0.0 { most } else { 1.0 }
    }
}

impl Bar {
    fn draw(&self, svg: &mut String, left: f64, middle: f64, scale: f64) {
        let colour = match self.name.starts_with("tierline") {
            true => OWN_BAR,
            false => OTHER_BAR,
        };
        let length = |figure: f64| {
            let known = if figure.is_finite() { figure } else { 0.0 };
            (known.max(0.0) * scale * 10.0).round() / 10.0
        };
        let (from, to) = (left + length(self.from), left + length(self.to));
        let base = middle + 4.5;
        // Writing into a string cannot fail.
        let _ = write!(
            svg,
            r#"<text x="{:.1}" y="{base}" text-anchor="end" fill="{INK}">{}</text>
<rect x="{left:.1}" y="{}" width="{}" height="{THICKNESS}" fill="{colour}"/>
<path d="M{from:.1} {middle}H{to:.1}" stroke="{INK}"/>
<text x="{:.1}" y="{base}" fill="{INK}">{}</text>
"#,
            left - 10.0,
            escape(&self.name),
            middle - THICKNESS / 2.0,
            length(self.median),
            to.max(left + length(self.median)) + 8.0,
            text_of(self.median),
        );
    }
}

fn bars(rows: &[Value], name: &str, [median, from, to]: [&str; 3]) -> Vec<Bar> {
    let bars = rows.iter().map(|row| {
        let figure = |field: &str| row[field].as_f64().unwrap_or(f64::NAN);
        Bar {
            name: row[name].as_str().unwrap_or_default().to_owned(),
            median: figure(median),
            from: figure(from),
            to: figure(to),
        }
    });
    bars.collect()
}

/// Three digits or all before the point, in groups of three.
fn text_of(figure: f64) -> String {
    if !figure.is_finite() {
        return "no figure".to_owned();
    }
    if figure < 100.0 {
        let decimals = if figure < 10.0 { 2 } else { 1 };
        return format!("{figure:.decimals$}");
    }
    let digits = format!("{figure:.0}");
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Text as XML has it, without the control characters that it cannot have.
fn escape(text: &str) -> String {
    let mut escaped = String::new();
    for letter in text.chars().filter(|letter| !letter.is_control()) {
        match letter {
            '<' => escaped += "&lt;",
            '>' => escaped += "&gt;",
            '&' => escaped += "&amp;",
            '"' => escaped += "&quot;",
            '\'' => escaped += "&#39;",
            letter => escaped.push(letter),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn odd_titles_and_figures_make_a_well_formed_chart() {
        for title in ["a < b & \"c\" > 'd'\u{0}", "<svg>", "&amp;", ""] {
            let contenders = [
                json!({ "contender": title, "median": 0.0, "min": 0.0, "max": 0.0 }),
                json!({ "contender": "tierline", "median": null, "min": null, "max": null }),
                json!({ "contender": "other", "median": -1.0, "min": -2.0, "max": 1e300 }),
            ];
            for count in 0..=contenders.len() {
                let contenders = &contenders[..count];
                let section = json!({ "title": title, "unit": title, "contenders": contenders });
                assert_well_formed(&Chart::of(&section).unwrap().to_svg());
            }
        }
        let not_a_number = Bar {
            name: "tierline".to_owned(),
            median: f64::NAN,
            from: f64::INFINITY,
            to: f64::NEG_INFINITY,
        };
        let chart = Chart {
            title: "none".to_owned(),
            legend: String::new(),
            bars: vec![not_a_number],
        };
        assert_well_formed(&chart.to_svg());
    }

    #[test]
    fn a_comparison_shows_its_medians_and_tierline_in_a_colour_of_its_own() {
        let section = json!({ "title": "Publishing, 256 bytes", "unit": "msg/s", "contenders": [
            { "contender": "tierline", "median": 12345.6, "min": 12000.0, "max": 13000.0 },
            { "contender": "Celery", "median": 6172.8, "min": 6000.0, "max": 7000.0 },
        ]});
        let chart = Chart::of(&section).unwrap();
        let svg = chart.to_svg();
        assert_well_formed(&svg);
        assert_eq!(chart.file_name(), "publishing-256-bytes.svg");
        assert!(svg.contains(">12,346</text>") && svg.contains(">6,173</text>"));
        assert_eq!(svg.matches(OWN_BAR).count(), 1);
    }

    #[test]
    fn distributions_are_drawn_and_other_parts_are_not() {
        let rows = json!([{ "name": "tierline", "count": 3, "p50_ms": 1.5, "p99_ms": 20.25 }]);
        let chart = Chart::of(&json!({ "title": "Waits", "rows": rows })).unwrap();
        assert!(chart.to_svg().contains(">1.50</text>"));
        assert!(Chart::of(&json!({ "title": "By minute", "figures": [] })).is_none());
    }

    /// As far as these charts go: tags that match, quotes in pairs, no bare `&`, no figure that is none.
    fn assert_well_formed(svg: &str) {
        let mut open = Vec::new();
        for part in svg.split('<').skip(1) {
            let (tag, text) = part.split_once('>').expect(svg);
            assert!(!text.contains('>'), "{svg}");
            assert!(tag.matches('"').count().is_multiple_of(2), "{svg}");
            let name = tag.split(' ').next().unwrap();
            match name.strip_prefix('/') {
                Some(name) => assert_eq!(open.pop(), Some(name), "{svg}"),
                None if tag.ends_with('/') => {}
                None => open.push(name),
            }
        }
        assert!(open.is_empty(), "{svg}");
        let entities = ["lt;", "gt;", "amp;", "quot;", "#39;"];
        let mut after_ampersands = svg.split('&').skip(1);
        assert!(after_ampersands.all(|it| entities.iter().any(|entity| it.starts_with(entity))));
        assert!(!svg.contains("NaN") && !svg.contains("inf") && !svg.contains('\u{0}'));
    }
}
