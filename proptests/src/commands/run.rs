//! `tqcheck run`.

use std::fs::File;
use std::io::{BufWriter, IsTerminal, Write};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use indicatif::{ProgressBar, ProgressStyle};

use super::{End, table};
use crate::adapters::{self, Device};
use crate::inputs::Family;
use crate::probes::Probe;
use crate::properties::{self, Property};
use crate::regressions::{self, Judgement};
use crate::run_report::{AdapterReport, PropertyReport, RunReport};
use crate::runner::{self, Shard, Summary};

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
    /// Cases of each property on each adapter, fewer of those that cost more; 200 unless --minutes is given
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    pub cases: Option<u64>,
    /// Run for so long, shared over properties and adapters; each checks one case at least
    #[arg(long, value_name = "M", value_parser = super::minutes)]
    pub minutes: Option<Duration>,
    /// Run part I of N: each draws cases of its own
    #[arg(long, value_name = "I/N", default_value = "1/1", value_parser = parse_shard)]
    pub shard: Shard,
    /// Write everything that was found to this file
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
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
    let variant = args.variant.as_deref().map(super::variant).transpose()?;
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
    // Before the run: it takes long.
    let json = args.json.as_ref().map(|path| {
        let file = File::create(path).with_context(|| format!("creating {}", path.display()))?;
        Ok::<_, anyhow::Error>((path, file))
    });
    let json = json.transpose()?;
    let cases = match (args.cases, args.minutes) {
        (Some(cases), _) => cases,
        (None, None) => 200,
        (None, Some(_)) => u64::MAX,
    };
    // A second signal ends the process at once.
    ctrlc::set_handler(|| {
        if STOP.swap(true, Ordering::Relaxed) {
            std::process::exit(130);
        }
        eprintln!("tqcheck: stopping after this case");
    })
    .context("watching for Ctrl-C")?;
    let start = Instant::now();
    let pairs = (devices.len() * properties.len()) as u32;
    let mut results = Vec::new();
    let mut done = 0;
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
            if STOP.load(Ordering::Relaxed) {
                println!("{} on {}: not run", property.name, device.label);
                continue;
            }
            // What one leaves of its share is the next ones'.
            let share = args
                .minutes
                .map(|all| all.saturating_sub(start.elapsed()) / (pairs - done));
            done += 1;
            if let Some(why) = property.unavailable() {
                println!("{} on {}: not checked: {why}", property.name, device.label);
                let judgement = Judgement::Fail(why.to_owned());
                results.push(PropertyReport::new(
                    property.name,
                    &device.label,
                    &Summary::default(),
                    &judgement,
                ));
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
            let shown = match cases {
                u64::MAX => u64::MAX,
                cases => args.shard.cases(property.cases(cases)),
            };
            let bar = progress_bar(shown, property, &device.label);
            let plan = runner::Plan {
                cases,
                seed: args.seed,
                families: families.clone(),
                variant,
                shard: args.shard,
                deadline: share.map(|share| Instant::now() + share),
                stop: Some(&STOP),
            };
            let summary = runner::run(property, device, &plan, |_| bar.inc(1));
            bar.finish_and_clear();
            if STOP.load(Ordering::Relaxed) && summary.cases() == 0 {
                println!("{} on {}: not run", property.name, device.label);
                continue;
            }
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
            results.push(PropertyReport::new(
                property.name,
                &device.label,
                &summary,
                &judgement,
            ));
            report.add_row(row(property, &device.label, &summary, &judgement));
        }
    }
    println!("{report}");
    let interrupted = STOP.load(Ordering::Relaxed);
    if interrupted {
        println!("stopped: {} of {pairs} were run", results.len());
    } else {
        devices.iter().copied().for_each(assumptions);
    }
    if let Some((path, file)) = json {
        let report = RunReport {
            tqcheck: env!("CARGO_PKG_VERSION"),
            git_revision: super::git_revision(),
            date: jiff::Timestamp::now().to_string(),
            seed: args.seed,
            shard: args.shard,
            interrupted,
            adapters: devices
                .iter()
                .map(|device| AdapterReport::new(device, interrupted))
                .collect(),
            results,
        };
        let mut file = BufWriter::new(file);
        serde_json::to_writer_pretty(&mut file, &report)
            .map_err(std::io::Error::from)
            .and_then(|()| file.flush())
            .with_context(|| format!("writing {}", path.display()))?;
    }
    Ok(match end {
        End::Holds if interrupted => End::Interrupted,
        end => end,
    })
}

/// Set by Ctrl-C: the case in hand is the last, and the report tells of what was done.
static STOP: AtomicBool = AtomicBool::new(false);

fn parse_shard(text: &str) -> Result<Shard, String> {
    text.parse()
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
    let template = match cases {
        // Time decides, not their number.
        u64::MAX => "{msg} {pos} {per_sec} {elapsed}",
        _ => "{msg} {bar:30} {pos}/{len} {per_sec} {eta}",
    };
    let style =
        ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
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
