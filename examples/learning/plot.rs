//! The plots.

use std::path::Path;

use plotters::{coord::Shift, prelude::*};

use super::{
    canvas::{COLORS, FONT, Picture, both},
    report::{Curve, Estimate, Report},
};

/// Draws quality, diversity and the teachers' scores over the training into `out`.
pub(crate) fn draw(out: &Path, world: &str, reports: &[Report]) -> anyhow::Result<()> {
    let some = |of: fn(&Curve) -> Vec<Option<Estimate>>| move |curve: &Curve| of(curve);
    let all = |estimates: &[Estimate]| estimates.iter().copied().map(Some).collect();
    let quality = Lines {
        reports,
        title: "Expected quality of an output, with 95 % intervals",
        of: &move |curve| all(&curve.quality),
    };
    both(out, &format!("learning-{world}-quality"), &quality)?;
    let diversity =
        Lines { reports, title: "How undecided the student is, in nats", of: &move |curve| all(&curve.entropy) };
    both(out, &format!("learning-{world}-diversity"), &diversity)?;
    let believed = Lines {
        reports,
        title: "By how much scores are above the truth",
        of: &some(|curve| curve.believed_above_truth.clone()),
    };
    both(out, &format!("learning-{world}-believed"), &believed)
}

/// A line with its interval for each arm.
struct Lines<'a> {
    reports: &'a [Report],
    title: &'a str,
    of: &'a dyn Fn(&Curve) -> Vec<Option<Estimate>>,
}

/// The width of the legend, in pixels.
const LEGEND: u32 = 170;

impl Picture for Lines<'_> {
    fn draw<B: DrawingBackend>(&self, area: &DrawingArea<B, Shift>) -> anyhow::Result<()>
    where
        B::ErrorType: 'static,
    {
        area.fill(&WHITE)?;
        let lines: Vec<(&Report, Vec<(usize, Estimate)>)> = self
            .reports
            .iter()
            .map(|report| {
                let points = report.curve.groups.iter().copied().zip((self.of)(&report.curve));
                (report, points.filter_map(|(group, point)| Some((group, point?))).collect())
            })
            .collect();
        let shown = || lines.iter().flat_map(|(_, points)| points);
        let groups = shown().map(|(group, _)| *group).max().unwrap_or(1);
        let low = shown().map(|(_, point)| point.mean).fold(f64::MAX, f64::min);
        let high = shown().map(|(_, point)| point.mean).fold(f64::MIN, f64::max);
        let margin = ((high - low) * 0.05).max(0.01);
        let (low, high) = (low - margin, high + margin);
        let mut chart = ChartBuilder::on(area)
            .caption(self.title, (FONT, 18))
            .margin(12)
            .margin_right(LEGEND)
            .x_label_area_size(40)
            .y_label_area_size(56)
            .build_cartesian_2d(0..groups, low..high)?;
        chart.configure_mesh().x_desc("group").label_style((FONT, 13)).light_line_style(TRANSPARENT).draw()?;
        let (width, _) = area.dim_in_pixel();
        let drawn = lines.iter().enumerate().filter(|(_, (_, points))| !points.is_empty());
        for (place, (number, (report, points))) in drawn.enumerate() {
            let color = color(number);
            let within = |value: f64| value.clamp(low, high);
            let above = points.iter().map(|(group, point)| (*group, within(point.high)));
            let below = points.iter().rev().map(|(group, point)| (*group, within(point.low)));
            chart.draw_series([Polygon::new(above.chain(below).collect::<Vec<_>>(), color.mix(0.12).filled())])?;
            let line = points.iter().map(|(group, point)| (*group, point.mean));
            chart.draw_series(LineSeries::new(line, color.stroke_width(2)))?;
            let at = ((width - LEGEND + 8) as i32, 48 + 20 * place as i32);
            area.draw(&PathElement::new([(at.0, at.1 + 7), (at.0 + 16, at.1 + 7)], color.stroke_width(3)))?;
            area.draw(&Text::new(report.arm.clone(), (at.0 + 22, at.1), (FONT, 13)))?;
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
