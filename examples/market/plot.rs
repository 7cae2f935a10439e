//! The plots, as SVG and PNG.

use std::path::Path;

use plotters::{coord::Shift, prelude::*};

use super::{
    canvas::{COLORS, FONT, Picture, SIZE, both},
    oracle,
    report::Report,
    world::World,
};

/// How many tasks spending is averaged over.
const BIN: usize = 25;

/// Draws the regret and the value by cost of all policies, and the payees of the last one, into `out`.
pub(crate) fn draw(out: &Path, world: &World, reports: &[Report]) -> anyhow::Result<()> {
    both(out, "regret", &Regret(reports))?;
    both(out, "quality-cost", &QualityByCost(world, reports))?;
    if let Some(report) = reports.last() {
        both(out, "spend-share", &SpendShare(world, report))?;
    }
    Ok(())
}

/// The regret against the oracle, task by task.
struct Regret<'a>(&'a [Report]);

impl Picture for Regret<'_> {
    fn draw<B: DrawingBackend>(&self, area: &DrawingArea<B, Shift>) -> anyhow::Result<()>
    where
        B::ErrorType: 'static,
    {
        area.fill(&WHITE)?;
        let tasks = self.0.first().map_or(1, |report| report.regret.len());
        let most = self.0.iter().flat_map(|report| &report.regret).copied().fold(1.0, f64::max);
        let mut chart = ChartBuilder::on(area)
            .caption("Regret of a student, in tasks done perfectly", (FONT, 18))
            .margin(12)
            .x_label_area_size(40)
            .y_label_area_size(56)
            .build_cartesian_2d(0..tasks, 0.0..most * 1.05)?;
        chart
            .configure_mesh()
            .x_desc("task")
            .y_label_formatter(&|tasks| format!("{tasks:.0}"))
            .label_style((FONT, 13))
            .light_line_style(TRANSPARENT)
            .draw()?;
        for (report, color) in self.0.iter().zip(COLORS) {
            let line = report.regret.iter().copied().enumerate().step_by(tasks.div_ceil(100));
            chart
                .draw_series(LineSeries::new(line, color.stroke_width(2)))?
                .label(&report.policy)
                .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], color.stroke_width(2)));
        }
        chart
            .configure_series_labels()
            .position(SeriesLabelPosition::UpperLeft)
            .background_style(WHITE.mix(0.8))
            .label_font((FONT, 13))
            .draw()?;
        area.present()?;
        Ok(())
    }
}

/// Value by cost, below the line of the optimum.
struct QualityByCost<'a>(&'a World, &'a [Report]);

impl Picture for QualityByCost<'_> {
    fn draw<B: DrawingBackend>(&self, area: &DrawingArea<B, Shift>) -> anyhow::Result<()>
    where
        B::ErrorType: 'static,
    {
        area.fill(&WHITE)?;
        let spent = self.1.iter().map(|report| report.spend_per_task_microusdc.mean);
        let most = spent.fold(self.0.budget_per_task_microusdc as f64, f64::max) * 1.3;
        let frontier = oracle::frontier(self.0, most);
        let lowest = self.1.iter().map(|report| report.value_per_task.low).fold(0.0, f64::min);
        let mut chart = ChartBuilder::on(area)
            .caption("Value of a task by its cost, and the most that can be had", (FONT, 18))
            .margin(12)
            .x_label_area_size(40)
            .y_label_area_size(56)
            .build_cartesian_2d(0.0..most, lowest..1.0)?;
        chart
            .configure_mesh()
            .x_desc("µUSDC a task")
            .x_label_formatter(&|cost| format!("{cost:.0}"))
            .y_desc("2 · accuracy − 1")
            .label_style((FONT, 13))
            .light_line_style(TRANSPARENT)
            .draw()?;
        chart.draw_series(LineSeries::new(frontier, BLACK.stroke_width(1)))?;
        for (report, color) in self.1.iter().zip(COLORS) {
            let (x, value) = (report.spend_per_task_microusdc.mean, report.value_per_task);
            chart.draw_series([PathElement::new([(x, value.low), (x, value.high)], color.stroke_width(2))])?;
            chart
                .draw_series([Circle::new((x, value.mean), 5, color.filled())])?
                .label(&report.policy)
                .legend(move |(x, y)| Circle::new((x + 9, y), 5, color.filled()));
        }
        chart
            .configure_series_labels()
            .position(SeriesLabelPosition::UpperLeft)
            .background_style(WHITE.mix(0.8))
            .label_font((FONT, 13))
            .draw()?;
        area.present()?;
        Ok(())
    }
}

/// The spending by evaluator over time.
struct SpendShare<'a>(&'a World, &'a Report);

impl Picture for SpendShare<'_> {
    fn draw<B: DrawingBackend>(&self, area: &DrawingArea<B, Shift>) -> anyhow::Result<()>
    where
        B::ErrorType: 'static,
    {
        area.fill(&WHITE)?;
        let Self(world, report) = self;
        let bins: Vec<Vec<f64>> = report
            .paid
            .chunks(BIN)
            .map(|bin| {
                let of = |number: usize| bin.iter().map(|paid| paid[number]).sum::<f64>() / bin.len() as f64;
                (0..world.evaluators.len()).map(of).collect()
            })
            .collect();
        let most = bins.iter().map(|bin| bin.iter().sum()).fold(1.0, f64::max);
        let mut chart = ChartBuilder::on(area)
            .caption(format!("{}: what a student pays, to whom", report.policy), (FONT, 18))
            .margin(12)
            .margin_right(150)
            .x_label_area_size(40)
            .y_label_area_size(56)
            .build_cartesian_2d(0..report.paid.len(), 0.0..most * 1.05)?;
        chart
            .configure_mesh()
            .x_desc("task")
            .y_desc("µUSDC a task")
            .y_label_formatter(&|cost| format!("{cost:.0}"))
            .label_style((FONT, 13))
            .light_line_style(TRANSPARENT)
            .draw()?;
        let count = world.evaluators.len();
        for (number, evaluator) in world.evaluators.iter().enumerate() {
            let style = COLORS[number % COLORS.len()].mix(if number < COLORS.len() { 0.9 } else { 0.45 });
            let bar = |(at, bin): (usize, &Vec<f64>)| {
                let base: f64 = bin[..number].iter().sum();
                let end = ((at + 1) * BIN).min(report.paid.len());
                Rectangle::new([(at * BIN, base), (end, base + bin[number])], style.filled())
            };
            chart.draw_series(bins.iter().enumerate().map(bar))?;
            // A legend beside the chart, in the order of the stack.
            let at = (SIZE.0 as i32 - 140, 60 + 18 * (count - 1 - number) as i32);
            area.draw(&Rectangle::new([at, (at.0 + 12, at.1 + 12)], style.filled()))?;
            area.draw(&Text::new(evaluator.name.clone(), (at.0 + 18, at.1), (FONT, 13)))?;
        }
        area.present()?;
        Ok(())
    }
}
