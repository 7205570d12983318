//! `tqcheck run`.

use std::io::IsTerminal;

use anyhow::Result;
use indicatif::{ProgressBar, ProgressStyle};

use super::{End, table};
use crate::adapters;
use crate::properties::{self, Property};
use crate::runner::{self, Summary};

/// Draws cases and checks every property on every adapter
#[derive(clap::Args)]
#[command(after_help = "Example: tqcheck run --adapter vulkan --property attention --cases 500")]
pub struct Args {
    /// Adapters whose backend, name or driver contains this text, or `all`
    #[arg(long, default_value = "all", value_name = "TEXT")]
    pub adapter: String,
    /// Only this property
    #[arg(long, value_name = "NAME")]
    pub property: Option<String>,
    /// Cases of each property on each adapter
    #[arg(long, default_value_t = 200, value_parser = clap::value_parser!(u64).range(1..))]
    pub cases: u64,
    /// Seed of the cases: the same seed draws the same cases
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
}

/// Runs the command.
///
/// # Errors
/// A property of that name does not exist.
pub fn run(args: &Args) -> Result<End> {
    let properties: Vec<&Property> = match &args.property {
        None => properties::ALL.iter().collect(),
        Some(name) => vec![properties::by_name(name).ok_or_else(|| {
            let names: Vec<&str> = properties::ALL.iter().map(|p| p.name).collect();
            anyhow::anyhow!("no property \"{name}\"; there are: {}", names.join(", "))
        })?],
    };
    let devices = match adapters::select(&args.adapter) {
        Ok(devices) => devices,
        Err(why) => {
            eprintln!("tqcheck: {why}");
            return Ok(End::NoAdapter);
        }
    };
    let mut report = table([
        "property",
        "adapter",
        "verdict",
        "cases",
        "not checked",
        "cases/s",
        "free choices",
        "largest observed/bound",
    ]);
    let mut end = End::Holds;
    for device in devices {
        for property in &properties {
            if let Some(why) = property.unavailable() {
                println!("{} on {}: not checked: {why}", property.name, device.label);
                report.add_row(row(property, &device.label, &Summary::default()));
                // Asked for by name, it is missed.
                if args.property.is_some() {
                    end = End::NoAdapter;
                }
                continue;
            }
            let bar = progress_bar(args.cases, property, &device.label);
            let summary = runner::run(property, device, args.cases, args.seed, |_| bar.inc(1));
            bar.finish_and_clear();
            if !summary.holds() {
                end = End::Violation;
            }
            explain(&device.label, property, &summary);
            report.add_row(row(property, &device.label, &summary));
        }
    }
    println!("{report}");
    Ok(end)
}

fn progress_bar(cases: u64, property: &Property, label: &str) -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template("{msg} {bar:30} {pos}/{len} {per_sec} {eta}")
        .unwrap_or_else(|_| ProgressStyle::default_bar());
    ProgressBar::new(cases)
        .with_style(style)
        .with_message(format!("{} on {label}", property.name))
}

fn row(property: &Property, label: &str, summary: &Summary) -> [String; 8] {
    let evidence = &summary.evidence;
    let verdict = if summary.broken.is_some() {
        "VIOLATED"
    } else if summary.held == 0 {
        "NOT CHECKED"
    } else {
        "holds"
    };
    let free = if evidence.discrete == 0 {
        "–".to_owned()
    } else {
        let share = evidence.free as f64 / evidence.discrete as f64;
        format!("{} of {} ({share:.1e})", evidence.free, evidence.discrete)
    };
    [
        property.name.to_owned(),
        label.to_owned(),
        verdict.to_owned(),
        summary.cases().to_string(),
        summary.not_checked.values().sum::<u64>().to_string(),
        format!("{:.0}", summary.rate()),
        free,
        if evidence.largest > 0.0 {
            format!("{:.2e}", evidence.largest)
        } else if evidence.compared > 0 {
            "exact".to_owned()
        } else {
            "–".to_owned()
        },
    ]
}

/// Says what was not checked and what was violated, the shrunk case with it.
fn explain(label: &str, property: &Property, summary: &Summary) {
    for (reason, n) in &summary.not_checked {
        println!("{} on {label}: {n} not checked: {reason}", property.name);
    }
    if let Some(broken) = &summary.broken {
        println!(
            "{} on {label}: VIOLATED by case {}: {}",
            property.name, broken.index, broken.drawn_violation
        );
        println!(
            "shrunk in {} checks to:\n\n{}\n{}\n",
            broken.shrink_checks,
            broken.shrunk.to_toml(),
            broken.violation
        );
    }
}
