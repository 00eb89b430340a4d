//! Plots HDR histograms as SVG: latency by percentile. The x axis is linear in nines, so each
//! further nine has the same width. The y axis is logarithmic.

use std::fmt::Write;

use hdrhistogram::Histogram;

/// One curve.
pub struct Curve<'a> {
    name: &'a str,
    times: &'a Histogram<u64>,
    /// Histogram units per plot unit: 1000 for ns shown as us.
    scale: f64,
}

impl<'a> Curve<'a> {
    pub fn new(name: &'a str, times: &'a Histogram<u64>, scale: f64) -> Self {
        Self { name, times, scale }
    }

    /// Value at a quantile in plot units, at least 0.1: the logarithm of 0 does not exist.
    fn value_at(&self, quantile: f64) -> f64 {
        (self.times.value_at_quantile(quantile) as f64 / self.scale).max(0.1)
    }
}

const WIDTH: f64 = 720.0;
const HEIGHT: f64 = 400.0;
const FONT: &str = r#"font-family="sans-serif" font-size="12""#;
/// Margins for the labels.
const LEFT: f64 = 70.0;
const BOTTOM: f64 = 50.0;
const TOP: f64 = 40.0;
const RIGHT: f64 = 20.0;
/// The x axis ends at this many nines: 5 = 99.999 %.
const NINES: u32 = 5;
const SEGMENTS_PER_CURVE: u32 = 60;
const COLOURS: [&str; 4] = ["#1f5fa8", "#b8541a", "#3a8a3a", "#7a4fa0"];

fn quantile(nines: f64) -> f64 {
    1.0 - 10f64.powf(-nines)
}

/// Draws the curves as an SVG document. `unit` is the label of the value axis.
pub fn svg(title: &str, unit: &str, curves: &[Curve]) -> String {
    let nines_max = f64::from(NINES);
    let ends = curves
        .iter()
        .flat_map(|curve| [curve.value_at(0.0), curve.value_at(quantile(nines_max))]);
    let (low, high) = ends.fold((f64::MAX, 1.0f64), |(low, high), value| {
        (low.min(value), high.max(value))
    });
    let exponent_min = low.log10().floor();
    let exponent_max = high.log10().ceil().max(exponent_min + 1.0);
    let x = |nines: f64| LEFT + (WIDTH - LEFT - RIGHT) * nines / nines_max;
    let y = |value: f64| {
        let share = (value.log10() - exponent_min) / (exponent_max - exponent_min);
        HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * share
    };
    let mut out = String::new();
    let mut put = |text: std::fmt::Arguments| {
        out.write_fmt(text)
            .expect("writing to a String cannot fail");
        out.push('\n');
    };
    put(format_args!(
        r#"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" {FONT}>
<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>
<text x="{LEFT}" y="22" font-size="15">{title}</text>"#
    ));
    for nines in 0..=NINES {
        let grid_x = x(f64::from(nines));
        let percent = quantile(f64::from(nines)) * 100.0;
        let digits = nines.saturating_sub(2) as usize;
        put(format_args!(
            r##"<path d="M{grid_x:.1} {TOP}V{:.1}" stroke="#ddd"/>"##,
            HEIGHT - BOTTOM
        ));
        put(format_args!(
            r#"<text x="{grid_x:.1}" y="{:.1}" text-anchor="middle">{percent:.digits$} %</text>"#,
            HEIGHT - BOTTOM + 18.0
        ));
    }
    for exponent in exponent_min as i32..=exponent_max as i32 {
        let value = 10f64.powi(exponent);
        let grid_y = y(value);
        put(format_args!(
            r##"<path d="M{LEFT} {grid_y:.1}H{:.1}" stroke="#ddd"/>"##,
            WIDTH - RIGHT
        ));
        put(format_args!(
            r#"<text x="{:.1}" y="{:.1}" text-anchor="end">{value} {unit}</text>"#,
            LEFT - 6.0,
            grid_y + 4.0
        ));
    }
    for (number, curve) in curves.iter().enumerate() {
        let colour = COLOURS[number % COLOURS.len()];
        let points: Vec<String> = (0..=SEGMENTS_PER_CURVE)
            .map(|segment| nines_max * f64::from(segment) / f64::from(SEGMENTS_PER_CURVE))
            .map(|nines| format!("{:.1},{:.1}", x(nines), y(curve.value_at(quantile(nines)))))
            .collect();
        put(format_args!(
            r#"<polyline fill="none" stroke="{colour}" stroke-width="2" points="{}"/>"#,
            points.join(" ")
        ));
        put(format_args!(
            r#"<text x="{:.1}" y="{:.1}" fill="{colour}">{}</text>"#,
            LEFT + 12.0,
            TOP + 18.0 * (number as f64 + 1.0),
            curve.name
        ));
    }
    out.push_str("</svg>\n");
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_picture_has_its_curves_inside() {
        let mut times = Histogram::new(3).unwrap();
        for value in 1..10_000u64 {
            times.record(value).unwrap();
        }
        let picture = svg("Title", "us", &[Curve::new("one", &times, 1_000.0)]);
        assert!(picture.starts_with("<svg") && picture.ends_with("</svg>\n"));
        let points = picture.split("points=\"").nth(1).unwrap();
        let points = points.split('"').next().unwrap();
        for point in points.split(' ') {
            let (x, y) = point.split_once(',').unwrap();
            let (x, y): (f64, f64) = (x.parse().unwrap(), y.parse().unwrap());
            assert!((LEFT..=WIDTH - RIGHT).contains(&x));
            assert!((TOP..=HEIGHT - BOTTOM).contains(&y));
        }
    }

    #[test]
    fn an_empty_histogram_is_drawn_too() {
        let times = Histogram::new(3).unwrap();
        assert!(svg("Title", "ns", &[Curve::new("none", &times, 1.0)]).contains("polyline"));
        assert!(svg("Title", "ns", &[]).contains("</svg>"));
    }
}
