//! `tqcheck run`.

use std::io::IsTerminal;

use anyhow::Result;
use indicatif::{ProgressBar, ProgressStyle};

use turboquant_wgpu::KernelVariant;

use super::{End, table};
use crate::adapters::{self, Device};
use crate::inputs::Family;
use crate::probes::Probe;
use crate::properties::{self, Property};
use crate::regressions::{self, Judgement};
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
    /// Cases of each property on each adapter; fewer of those that cost more
    #[arg(long, default_value_t = 200, value_parser = clap::value_parser!(u64).range(1..))]
    pub cases: u64,
    /// Seed of the cases: the same seed draws the same cases
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
    /// Draw keys, values and queries of this family alone, or of `ordinary` ones
    #[arg(long, value_name = "NAME")]
    pub family: Option<String>,
    /// Run this variant of the kernels alone: portable or subgroup. By default each case draws one of those
    /// that the adapter can run
    #[arg(long, value_name = "NAME")]
    pub variant: Option<String>,
    /// Do not save the shrunk case of a failure under regressions/
    #[arg(long)]
    pub no_save: bool,
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
    let families = args.family.as_deref().map(families).transpose()?;
    let variant = args.variant.as_deref().map(variant).transpose()?;
    let devices = match adapters::select(&args.adapter) {
        Ok(devices) => devices,
        Err(why) => {
            eprintln!("tqcheck: {why}");
            return Ok(End::NoAdapter);
        }
    };
    if let Some(variant) = variant {
        // Asked for by name, it is missed.
        for device in &devices {
            if !device.variants().contains(&variant) {
                eprintln!(
                    "tqcheck: {} cannot run variant {}",
                    device.label,
                    variant.name()
                );
                return Ok(End::NoAdapter);
            }
        }
    }
    let expected = regressions::expected(&regressions::dir())?;
    let mut report = table([
        "property",
        "adapter",
        "verdict",
        "cases",
        "not checked",
        "cases/s",
        "free choices",
        "largest observed/bound",
        "RMS/twin",
    ]);
    let mut end = End::Holds;
    for &device in &devices {
        for property in &properties {
            if let Some(why) = property.unavailable() {
                println!("{} on {}: not checked: {why}", property.name, device.label);
                let judgement = Judgement::Fail(why.to_owned());
                report.add_row(row(
                    property,
                    &device.label,
                    &Summary::default(),
                    &judgement,
                ));
                // Asked for by name, it is missed.
                if args.property.is_some() {
                    end = End::NoAdapter;
                }
                continue;
            }
            let bar = progress_bar(property.cases(args.cases), property, &device.label);
            let plan = runner::Plan {
                cases: args.cases,
                seed: args.seed,
                families: families.clone(),
                variant,
            };
            let summary = runner::run(property, device, &plan, |_| bar.inc(1));
            bar.finish_and_clear();
            let judgement = regressions::judge(
                &expected,
                &device.label,
                &device.driver,
                property.name,
                summary.failure().as_deref(),
                regressions::today(),
            );
            if let Judgement::Fail(why) = &judgement {
                end = End::Violation;
                println!("{} on {}: {why}", property.name, device.label);
            }
            explain(args, device, property, &summary);
            report.add_row(row(property, &device.label, &summary, &judgement));
        }
    }
    println!("{report}");
    for device in devices {
        assumptions(device);
    }
    Ok(end)
}

fn variant(name: &str) -> Result<KernelVariant> {
    KernelVariant::by_name(name).ok_or_else(|| {
        let names = KernelVariant::ALL.map(KernelVariant::name).join(", ");
        anyhow::anyhow!("no variant \"{name}\"; there are: {names}")
    })
}

/// The families that a name stands for.
fn families(name: &str) -> Result<Vec<Family>> {
    let matching: Vec<Family> = Family::ALL
        .into_iter()
        .filter(|f| f.name() == name || (name == "ordinary" && f.is_ordinary()))
        .collect();
    let names: Vec<&str> = Family::ALL.iter().map(|f| f.name()).collect();
    anyhow::ensure!(
        !matching.is_empty(),
        "no family \"{name}\"; there are: ordinary, {}",
        names.join(", ")
    );
    Ok(matching)
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

fn row(property: &Property, label: &str, summary: &Summary, judgement: &Judgement) -> [String; 9] {
    let evidence = &summary.evidence;
    let verdict = match judgement {
        Judgement::Pass => "holds",
        Judgement::ExpectedFailure(_) => "fails as expected",
        Judgement::Fail(_) if summary.broken.is_some() => "VIOLATED",
        Judgement::Fail(_) if summary.held == 0 => "NOT CHECKED",
        Judgement::Fail(_) => "FAILED",
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
        if evidence.drift.n == 0 {
            "–".to_owned()
        } else {
            format!("{:.2}", evidence.drift.ratio())
        },
    ]
}

/// Says what was not checked and what was violated, the shrunk case with it, and saves that.
fn explain(args: &Args, device: &Device, property: &Property, summary: &Summary) {
    let label = &device.label;
    for (reason, n) in &summary.not_checked {
        println!("{} on {label}: {n} not checked: {reason}", property.name);
    }
    let Some(broken) = &summary.broken else {
        return;
    };
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
    let suspects: Vec<String> = device
        .probes()
        .broken_for(property.name)
        .map(Probe::describe)
        .collect();
    if suspects.is_empty() {
        println!(
            "every probe that {} rests on is kept: no defect of the adapter explains this\n",
            property.name
        );
    } else {
        println!(
            "{} rests on what this adapter gets wrong: {}\n",
            property.name,
            suspects.join("; ")
        );
    }
    if args.no_save {
        return;
    }
    match regressions::save(&regressions::dir(), device, args.seed, broken) {
        Ok(path) => println!(
            "replay it with: tqcheck replay {} --adapter \"{label}\"\n",
            path.display()
        ),
        Err(error) => println!("it could not be saved: {error}\n"),
    }
}

/// Says which assumptions of the bounds do not hold on an adapter.
fn assumptions(device: &Device) {
    let broken: Vec<&Probe> = device.probes().broken().collect();
    if broken.is_empty() {
        println!("{}: every assumption of the bounds holds", device.label);
    }
    for probe in broken {
        let carried = match &probe.carries()[..] {
            [] => "no property rests on it".to_owned(),
            properties => format!("{} rest on it", properties.join(", ")),
        };
        println!(
            "{}: assumption broken: {} ({carried})",
            device.label,
            probe.describe()
        );
    }
}
