//! The pictures.

use std::path::Path;

use plotters::{coord::Shift, prelude::*};

use super::{
    canvas::{COLORS, FONT, Picture, both},
    report::Estimate,
};

/// The width of the legend, in pixels.
const LEGEND: u32 = 190;

/// A line with its interval for each name.
pub(crate) struct Lines<'a> {
    pub(crate) title: &'a str,
    /// What is to the right.
    pub(crate) x: &'a str,
    /// Labels of whole numbers from 0; without them, numbers are shown.
    pub(crate) labels: &'a [&'a str],
    pub(crate) lines: Vec<(String, Vec<(f64, Estimate)>)>,
}

impl Lines<'_> {
    /// Draws into `out`, as `name.svg` and `name.png`.
    pub(crate) fn draw_into(&self, out: &Path, name: &str) -> anyhow::Result<()> {
        both(out, name, self)
    }
}

impl Picture for Lines<'_> {
    fn draw<B: DrawingBackend>(&self, area: &DrawingArea<B, Shift>) -> anyhow::Result<()>
    where
        B::ErrorType: 'static,
    {
        area.fill(&WHITE)?;
        let points = || self.lines.iter().flat_map(|(_, points)| points);
        let left = points().map(|(x, _)| *x).fold(f64::MAX, f64::min);
        let right = points().map(|(x, _)| *x).fold(f64::MIN, f64::max);
        let most = points().map(|(_, y)| y.high).fold(0.0, f64::max);
        let mut chart = ChartBuilder::on(area)
            .caption(self.title, (FONT, 18))
            .margin(12)
            .margin_right(LEGEND)
            .x_label_area_size(40)
            .y_label_area_size(56)
            .build_cartesian_2d(left..right, 0.0..most * 1.05)?;
        let label = |x: &f64| match self.labels.get(x.round() as usize) {
            Some(label) if (x - x.round()).abs() < 1e-9 => (*label).to_owned(),
            Some(_) => String::new(),
            None => ((x * 100.0).round() / 100.0).to_string(),
        };
        chart
            .configure_mesh()
            .x_desc(self.x)
            .x_label_formatter(&label)
            .label_style((FONT, 13))
            .light_line_style(TRANSPARENT)
            .draw()?;
        let (width, _) = area.dim_in_pixel();
        for (place, (name, points)) in self.lines.iter().enumerate() {
            let color = color(place);
            let above = points.iter().map(|(x, y)| (*x, y.high));
            let below = points.iter().rev().map(|(x, y)| (*x, y.low));
            chart.draw_series([Polygon::new(above.chain(below).collect::<Vec<_>>(), color.mix(0.12).filled())])?;
            let line = points.iter().map(|(x, y)| (*x, y.mean));
            chart.draw_series(LineSeries::new(line, color.stroke_width(2)))?;
            let at = ((width - LEGEND + 8) as i32, 48 + 20 * place as i32);
            area.draw(&PathElement::new([(at.0, at.1 + 7), (at.0 + 16, at.1 + 7)], color.stroke_width(3)))?;
            area.draw(&Text::new(name.clone(), (at.0 + 22, at.1), (FONT, 13)))?;
        }
        area.present()?;
        Ok(())
    }
}

/// Six colours beyond those of the canvas.
fn color(number: usize) -> RGBColor {
    const MORE: [RGBColor; 6] = [
        RGBColor(0, 0, 0),
        RGBColor(128, 0, 64),
        RGBColor(0, 96, 96),
        RGBColor(160, 120, 80),
        RGBColor(180, 180, 0),
        RGBColor(90, 90, 255),
    ];
    COLORS.iter().chain(&MORE).copied().cycle().nth(number).unwrap_or(BLACK)
}
