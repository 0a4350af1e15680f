//! The README's chart: locks per second, relative to the hand-written loop.

use std::error::Error;
use std::path::Path;

use plotters::prelude::{
    ChartBuilder, Color, IntoDrawingArea, IntoFont, RGBColor, Rectangle, SVGBackend,
    SeriesLabelPosition, Text, WHITE,
};

use crate::figures::{Metric, Samples, Spread};
use crate::participants::Who;
use crate::same::NODES;
use crate::uncontended::at_once;

/// Draws the figures of W1 and W2 as an SVG.
pub(crate) fn draw(path: &Path, samples: &Samples) -> Result<(), Box<dyn Error>> {
    let bars = bars(samples);
    let highest = bars.iter().map(|bar| bar.ratio).fold(1.0, f64::max);
    let root = SVGBackend::new(path, SIZE).into_drawing_area();
    root.fill(&WHITE)?;
    let title =
        format!("Uncontended locks per second on {NODES} nodes, relative to a loop by hand");
    let columns = CONCURRENCIES.len() * COLUMNS;
    let mut chart = ChartBuilder::on(&root)
        .caption(title, ("sans-serif", 18))
        .margin(10)
        .x_label_area_size(30)
        .y_label_area_size(40)
        .build_cartesian_2d(0.0..columns as f64, 0.0..highest * 1.5)?;
    chart
        .configure_mesh()
        .disable_x_mesh()
        .disable_x_axis()
        .y_label_formatter(&|ratio| format!("{ratio:.1}"))
        .max_light_lines(0)
        .draw()?;
    for (who, color) in COLORS {
        let own = bars.iter().filter(|bar| bar.who == who);
        let rectangles = own.clone().map(|bar| {
            let corners = [(bar.column + 0.06, 0.0), (bar.column + 0.94, bar.ratio)];
            Rectangle::new(corners, color.filled())
        });
        let series = chart.draw_series(rectangles)?;
        series
            .label(who.name())
            .legend(move |(x, y)| Rectangle::new([(x, y - 5), (x + 12, y + 5)], color.filled()));
        let figures = own.map(|bar| {
            let place = (bar.column + 0.12, bar.ratio + highest * 0.05);
            Text::new(
                format!("{:.2}", bar.ratio),
                place,
                ("sans-serif", 12).into_font(),
            )
        });
        chart.draw_series(figures)?;
    }
    let groups = CONCURRENCIES
        .into_iter()
        .enumerate()
        .map(|(group, concurrency)| {
            let place = ((group * COLUMNS) as f64 + 2.6, -highest * 0.02);
            let text = format!("{concurrency} at once");
            Text::new(text, place, ("sans-serif", 14).into_font())
        });
    chart.draw_series(groups)?;
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperLeft)
        .border_style(RGBColor(200, 200, 200))
        .background_style(WHITE)
        .draw()?;
    root.present()?;
    Ok(())
}

struct Bar {
    who: Who,
    column: f64,
    ratio: f64,
}

/// Takes medians of ratios, not ratios of medians, as the tables do.
fn bars(samples: &Samples) -> Vec<Bar> {
    let mut bars = Vec::new();
    for (group, concurrency) in CONCURRENCIES.into_iter().enumerate() {
        for (place, (who, _)) in COLORS.into_iter().enumerate() {
            let name = at_once(concurrency);
            let ratios = samples.ratios(&name, Metric::Rate, who, Who::ByHand);
            bars.extend(Spread::of(&ratios).map(|spread| Bar {
                who,
                column: (group * COLUMNS + place) as f64,
                ratio: spread.median,
            }));
        }
    }
    bars
}

const SIZE: (u32, u32) = (900, 420);
const CONCURRENCIES: [usize; 4] = [1, 16, 64, 256];

/// One per participant, and one between the groups.
const COLUMNS: usize = 8;

/// Participants that send the same commands are side by side.
const COLORS: [(Who, RGBColor); 7] = [
    (Who::Ours, RGBColor(37, 99, 235)),
    (Who::ByHand, RGBColor(148, 163, 184)),
    (Who::Batched, RGBColor(203, 213, 225)),
    (Who::Rslock, RGBColor(217, 119, 6)),
    (Who::OursFenced, RGBColor(30, 64, 175)),
    (Who::ByHandFenced, RGBColor(100, 116, 139)),
    (Who::BatchedFenced, RGBColor(71, 85, 105)),
];
