//! `tqcheck bench` from end to end, at shapes that take a moment.

use std::fs;

use clap::Parser;
use serde_json::Value;
use tqcheck::adapters;
use tqcheck::commands::{End, bench};

#[derive(Parser)]
struct Cli {
    #[command(flatten)]
    args: bench::Args,
}

fn args(line: &[&str]) -> bench::Args {
    Cli::parse_from([&["bench"], line].concat()).args
}

/// False where there is no adapter, which is a failure where one is required.
fn adapter() -> bool {
    let found = !adapters::all().is_empty();
    let required = std::env::var_os("TQCHECK_REQUIRE").is_some();
    assert!(found || !required, "an adapter is required");
    if !found {
        eprintln!("not checked: no adapter");
    }
    found
}

#[test]
fn a_tiny_shape_is_measured_beside_its_baselines() {
    if !adapter() {
        return;
    }
    let dir = tempfile::tempdir().expect("a directory");
    let json = dir.path().join("bench.json");
    let path = json.to_str().expect("a path of text");
    let line = ["--shape", "4x2-d32-s64", "--repeats", "3", "--json", path];
    let end = bench::run(&args(&line)).expect("it runs");
    assert_eq!(end, End::Holds);
    let text = fs::read_to_string(&json).expect("the report");
    let report: Value = serde_json::from_str(&text).expect("JSON");
    assert!(report["copy"]["gb_per_s"].as_f64().is_some_and(|r| r > 0.0));
    let rows = report["rows"].as_array().expect("rows");
    let of = |kernel: &str| {
        rows.iter()
            .find(|row| row["kernel"] == kernel)
            .unwrap_or_else(|| panic!("{kernel} is measured"))
    };
    for kernel in ["encode", "rotate", "decode", "prefill"] {
        let row = of(kernel);
        let median = row["median_ns"].as_f64().expect("a median");
        assert!(median > 0.0 && row["min_ns"].as_f64().is_some_and(|m| m <= median));
        let baselines = row["baselines"].as_array().expect("baselines");
        for baseline in baselines {
            let ratio = baseline["median_ns"].as_f64().expect("a median") / median;
            let said = baseline["ratio"].as_f64().expect("a ratio");
            assert!((said / ratio - 1.0).abs() < 1e-9, "{kernel}");
        }
        assert!(baselines.iter().any(|b| b["name"] == "twin"), "{kernel}");
    }
    let flash = |row: &Value| row["baselines"][0]["name"] == "flash_f16";
    assert!(flash(of("decode")) && flash(of("prefill")));
    // What a baseline cannot do is said, not passed over.
    let skipped = report["skipped"].as_array().expect("what was left out");
    assert!(
        skipped
            .iter()
            .any(|s| s["implementation"] == "flash_f16" && s["kernel"] == "encode")
    );
}

/// A budget that is spent before it begins leaves out every job of the grid, each with its reason.
#[test]
fn what_the_budget_leaves_out_is_listed() {
    if !adapter() {
        return;
    }
    let dir = tempfile::tempdir().expect("a directory");
    let json = dir.path().join("bench.json");
    let path = json.to_str().expect("a path of text");
    let line = [
        "--shape",
        "9x3",
        "--kernel",
        "decode",
        "--repeats",
        "1",
        "--minutes",
        "0.000000001",
        "--json",
        path,
    ];
    bench::run(&args(&line)).expect("it runs");
    let text = fs::read_to_string(&json).expect("the report");
    let report: Value = serde_json::from_str(&text).expect("JSON");
    assert_eq!(report["rows"].as_array().map(Vec::len), Some(0));
    let skipped = report["skipped"].as_array().expect("what was left out");
    assert_eq!(skipped.len(), 24);
    for one in skipped {
        let reason = one["reason"].as_str().expect("a reason");
        assert!(reason.contains("budget"), "{reason}");
    }
}

#[test]
fn growth_is_drawn_and_listed() {
    if !adapter() {
        return;
    }
    let dir = tempfile::tempdir().expect("a directory");
    let growth = dir.path().join("growth");
    let path = growth.to_str().expect("a path of text");
    let line = ["--repeats", "1", "--minutes", "0.1", "--growth", path];
    assert_eq!(bench::run(&args(&line)).expect("it runs"), End::Holds);
    let text = fs::read_to_string(growth.join("growth.json")).expect("JSON");
    let report: Value = serde_json::from_str(&text).expect("JSON");
    let series = report["series"].as_array().expect("series");
    assert_eq!(series.len(), tqbench::growth::SERIES.len());
    let points = |s: &Value| s["points"].as_array().map_or(0, Vec::len);
    let measured: usize = series.iter().map(points).sum();
    assert!(measured > series.len(), "{measured} points");
    let csv = fs::read_to_string(growth.join("growth.csv")).expect("CSV");
    assert_eq!(csv.lines().count(), 1 + measured);
    let svg = fs::read_to_string(growth.join("time-sequence.svg")).expect("a drawing");
    assert!(svg.contains("decode"));
}
