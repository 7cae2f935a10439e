//! The files in `deploy/`: alerts and dashboards name what exists, the guide says what to do, and the flags are those of the command. That
//! they are YAML, rules and a unit is checked by the step *deploy* of `.ci/run`.

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
};

use serde_json::Value;
use tower_x402::ops::{METRICS, Metric, MetricKind};

use crate::stage::{read, run, x402};

const GUIDE: &str = "docs/guide/operate.md";
/// Metrics that the command never reports: it knows no price of ETH, and defers nothing.
const OF_OTHERS: [&str; 2] = ["x402_losses_total", "x402_deferred_outstanding_units"];

fn package() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).to_owned()
}

fn text(path: &str) -> String {
    read(&package().join(path))
}

/// A metric of a query, and the labels that the query selects it by.
type Selected<'a> = (&'a str, Vec<&'a str>);

fn is_of_name(character: char) -> bool {
    character.is_ascii_alphanumeric() || character == '_'
}

/// Returns the metrics that a query names. The metrics of Prometheus itself do not begin with `x402_`.
fn selected(query: &str) -> Vec<Selected<'_>> {
    let starts = query.match_indices("x402_").map(|(at, _)| at);
    let starts = starts.filter(|at| !query[..*at].ends_with(is_of_name));
    starts
        .map(|at| {
            let rest = &query[at..];
            let (name, rest) = rest.split_at(rest.find(|c| !is_of_name(c)).unwrap_or(rest.len()));
            let inside = rest.strip_prefix('{').and_then(|rest| rest.split_once('}')).map_or("", |(inside, _)| inside);
            let labels = inside.split(',').filter_map(|matcher| matcher.split(['=', '!']).next()).map(str::trim);
            (name, labels.filter(|label| !label.is_empty()).collect())
        })
        .collect()
}

fn metric_of(name: &str) -> Option<&'static Metric> {
    let exact = METRICS.iter().find(|metric| metric.name == name && metric.kind != MetricKind::Histogram);
    let of_histogram = || {
        let base = ["_bucket", "_sum", "_count"].iter().find_map(|suffix| name.strip_suffix(suffix))?;
        METRICS.iter().find(|metric| metric.name == base && metric.kind == MetricKind::Histogram)
    };
    exact.or_else(of_histogram)
}

/// Checks that each metric of a query exists and has the labels, and returns the names.
fn checked(query: &str) -> BTreeSet<&'static str> {
    let of_prometheus = ["job", "instance", "le"];
    let check = |(name, labels): Selected<'_>| {
        let metric = metric_of(name).unwrap_or_else(|| panic!("no metric {name} in {query}"));
        for label in labels {
            assert!(metric.labels.contains(&label) || of_prometheus.contains(&label), "{name} has no {label}: {query}");
        }
        metric.name
    };
    selected(query).into_iter().map(check).collect()
}

/// Returns the queries of the panels.
fn queries(dashboard: &Value) -> Vec<&str> {
    let panels = dashboard["panels"].as_array().unwrap();
    let targets = panels.iter().flat_map(|panel| panel["targets"].as_array().unwrap());
    targets.map(|target| target["expr"].as_str().unwrap()).collect()
}

#[test]
fn alerts_and_dashboard_name_only_metrics_that_exist() {
    let rules = text("deploy/prometheus-rules.yaml");
    assert!(!checked(&rules).is_empty());
    let dashboard: Value = serde_json::from_str(&text("deploy/grafana-dashboard.json")).unwrap();
    let shown: BTreeSet<_> = queries(&dashboard).into_iter().flat_map(checked).collect();
    let reported: BTreeSet<_> =
        METRICS.iter().map(|metric| metric.name).filter(|name| !OF_OTHERS.contains(name)).collect();
    assert_eq!(shown, reported, "the dashboard shows each that the command reports");
    assert!(checked(&text(GUIDE)).contains("x402_charged_units_total"));
}

#[test]
fn a_metric_that_does_not_exist_is_noticed() {
    assert_eq!(
        selected("rate(x402_a_total{b=\"c\",d!~\"e\"}[5m]) / x402_f"),
        [("x402_a_total", vec!["b", "d"]), ("x402_f", vec![])]
    );
    assert!(metric_of("x402_requests").is_none() && metric_of("x402_requests_total_count").is_none());
    assert!(metric_of("x402_settlement_duration_seconds").is_none(), "a histogram is queried by its parts");
    assert!(metric_of("x402_settlement_duration_seconds_bucket").is_some());
}

#[test]
fn the_guide_says_what_to_do_about_each_alert() {
    let rules = text("deploy/prometheus-rules.yaml");
    let alerts: Vec<_> = rules.lines().filter_map(|line| line.trim().strip_prefix("- alert: ")).collect();
    let guide = text(GUIDE);
    let rows: Vec<_> = guide.lines().filter_map(|line| line.strip_prefix("| `X402")?.split('`').next()).collect();
    let named: Vec<_> = alerts.iter().map(|alert| alert.strip_prefix("X402").unwrap()).collect();
    assert_eq!(rows, named, "in the order of the rules");
    // Those that page come first, and have a table of their own.
    let night = guide.split("### What can wait").next().unwrap();
    for rule in rules.split("- alert: ").skip(1) {
        let alert = rule.lines().next().unwrap();
        assert_eq!(rule.contains("severity: page"), night.contains(&format!("| `{alert}` |")), "{alert}");
        assert!(
            rule.contains("summary: ") && (rule.contains("severity: page") != rule.contains("severity: ticket")),
            "{alert}"
        );
    }
}

/// Returns the arguments after `x402`, with what the environment would fill in.
fn arguments(line: &str) -> Vec<String> {
    let filled = |word: &str| {
        let word = word.trim_start_matches("- ").replace("$$", "$");
        let word = word.replace("${NETWORK:?base or base-sepolia}", "base");
        word.replace("${PAY_TO:?the address that is paid}", "0x70997970C51812dc3A010C7d01b50e0d17dc79C8")
    };
    line.split('\n').map(str::trim).filter(|word| !word.is_empty()).map(filled).collect()
}

async fn is_understood(file: &str, arguments: &[String]) {
    let output = run(x402().args(arguments).arg("--print-config")).await;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(arguments.len() > 1 && output.status.success(), "{file}: {arguments:?}: {said}");
}

#[tokio::test]
async fn the_flags_in_deploy_are_those_of_the_command() {
    for file in ["deploy/compose.yaml", "deploy/compose.postgres.yaml"] {
        let compose = text(file);
        let after = compose.split("    command:\n").nth(1).unwrap();
        let lines: Vec<_> = after.lines().take_while(|line| line.starts_with("      ")).collect();
        let lines: Vec<_> =
            lines.iter().map(|line| line.trim().trim_start_matches("# ").split("    #").next().unwrap()).collect();
        let lines: Vec<_> =
            lines.into_iter().map(|line| line.replace("0x…", "${PAY_TO:?the address that is paid}")).collect();
        is_understood(file, &arguments(&lines.join("\n"))).await;
    }
    let container = text("deploy/Containerfile");
    let command = container.lines().find_map(|line| line.strip_prefix("CMD ")).unwrap();
    is_understood("Containerfile", &serde_json::from_str::<Vec<String>>(command).unwrap()).await;
    let unit = text("deploy/x402-charge.service");
    let start = unit.lines().find_map(|line| line.strip_prefix("ExecStart=/usr/local/bin/x402 ")).unwrap();
    is_understood("x402-charge.service", &start.split(' ').map(str::to_owned).collect::<Vec<_>>()).await;
}
