//! `tqcheck bench`.

use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde::Serialize;
use tqbench::clock::STAMP_FEATURES;
use tqbench::growth::{Axis, Series};
use tqbench::job::Kernel;
use tqbench::plot;
use tqbench::report::{Report, Row, Skipped, Versions};
use tqbench::shape;
use tqbench::suite::{Baseline, Bench, Event, Plan, Scale};
use turboquant_wgpu::{Gpu, GpuOptions, KernelVariant};

use super::{End, table};
use crate::adapters::{self, Adapter};

/// Measures the kernels over a grid of shapes, beside the device's copy speed and other implementations
#[derive(clap::Args)]
#[command(
    after_help = "Example: tqcheck bench --adapter vulkan --shape 32x8-d128-s1024 --json bench.json"
)]
pub struct Args {
    /// The first adapter whose backend, name or driver contains this text
    #[arg(long, default_value = "all", value_name = "TEXT")]
    pub adapter: String,
    /// Only this shape, or those of the grid that begin so: 32x8, 32x8-d128, 32x8-d128-s32768
    #[arg(long, value_name = "NAME")]
    pub shape: Option<String>,
    /// Only this kernel: encode, rotate, decode or prefill
    #[arg(long, value_name = "NAME")]
    pub kernel: Option<String>,
    /// Measure this variant of the kernels; by default the fastest that the adapter can run, matrices included
    #[arg(long, value_name = "NAME")]
    pub variant: Option<String>,
    /// Write everything that was found to this file
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Measure instead how time and memory grow with sequence, rows, heads and layers, and write drawings, CSV and
    /// JSON to this directory
    #[arg(long, value_name = "DIR", conflicts_with_all = ["shape", "kernel", "json", "baselines"])]
    pub growth: Option<PathBuf>,
    /// Compare with these, separated by commas, or with `none`; by default with what is built in
    #[arg(long, value_name = "LIST")]
    pub baselines: Option<String>,
    /// Time each job so often; fewer of those that take long
    #[arg(long, default_value_t = 15, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub repeats: u32,
    /// Measure for no longer; what does not fit is left out and listed
    #[arg(long, value_name = "M", value_parser = super::minutes)]
    pub minutes: Option<Duration>,
}

/// Runs the command.
///
/// # Errors
/// A name that means nothing, a file that cannot be written, a device that fails.
pub fn run(args: &Args) -> Result<End> {
    let (shapes, kernels, baselines) = (
        shapes(args.shape.as_deref())?,
        kernels(args.kernel.as_deref())?,
        baselines(args.baselines.as_deref())?,
    );
    let variant = args.variant.as_deref().map(super::variant).transpose()?;
    let adapter = match adapters::matching(&args.adapter) {
        Ok(adapters) => adapters[0],
        Err(why) => {
            eprintln!("tqcheck: {why}");
            return Ok(End::NoAdapter);
        }
    };
    // Before the measurements: they take long.
    let json = args.json.as_ref().map(|path| {
        let file = File::create(path).with_context(|| format!("creating {}", path.display()))?;
        Ok::<_, anyhow::Error>((path, file))
    });
    let json = json.transpose()?;

    if let Some(dir) = &args.growth {
        fs::create_dir_all(dir).with_context(|| format!("creating {}", dir.display()))?;
    }

    let opened = || open(adapter, variant);
    let (first_result_ns, gpu) = match tqbench::first_result(opened) {
        Ok(found) => found,
        Err(OpenError::Unusable(why)) => {
            eprintln!("tqcheck: {}: unusable: {why}", adapter.label());
            return Ok(End::NoAdapter);
        }
        Err(OpenError::Bench(error)) => return Err(error.into()),
    };
    let scale = Scale::of(adapter.info.device_type);
    let plan = Plan {
        shapes,
        kernels,
        baselines,
        repeats: args.repeats as usize,
        scale,
        budget: args.minutes,
    };
    let mut bench = Bench::new(&gpu, scale, plan.repeats)?;
    println!("{}: {}", adapter.label(), driver(adapter));
    println!("first output of attention after {}", time(first_result_ns));
    let copy = bench.copy();
    println!(
        "copy: {:.1} GB/s, {} of {} MB read and written",
        copy.gb_per_s,
        time(copy.time.median_ns),
        copy.bytes / 1_000_000
    );
    println!("times by the {} clock", bench.clock().source());
    if let Some(note) = bench.clock().distrust() {
        println!("not by the device's: {note}");
    }
    if let Some(dir) = &args.growth {
        let series = bench.growth(plan.repeats, plan.budget, tell_growth)?;
        let growth = Growth {
            adapter: adapter.label(),
            driver: driver(adapter),
            git_revision: super::git_revision(),
            date: jiff::Timestamp::now().to_string(),
            series,
        };
        write_growth(dir, &growth)?;
        return Ok(End::Holds);
    }
    let (rows, skipped) = bench.run(&plan, tell)?;
    println!("{}", listed(&rows));
    if !skipped.is_empty() {
        println!("left out:\n{}", left_out(&skipped));
    }
    let report = Report {
        adapter: adapter.info.name.clone(),
        backend: adapter.info.backend.to_string(),
        device_type: format!("{:?}", adapter.info.device_type),
        driver: driver(adapter),
        versions: Versions {
            turboquant_wgpu: env!("CARGO_PKG_VERSION"),
            tqcheck: env!("CARGO_PKG_VERSION"),
            wgpu: "30",
            cera: Baseline::Cera.setup().map(|_| "0.5.5"),
        },
        git_revision: super::git_revision(),
        date: jiff::Timestamp::now().to_string(),
        timing: bench.clock().source(),
        timing_note: bench.clock().distrust().map(str::to_owned),
        first_result_ns,
        copy,
        rows,
        skipped,
    };
    if let Some((path, file)) = json {
        let mut file = BufWriter::new(file);
        let wrote = serde_json::to_writer_pretty(&mut file, &report)
            .map_err(std::io::Error::from)
            .and_then(|()| file.flush());
        wrote.with_context(|| format!("writing {}", path.display()))?;
    }
    Ok(End::Holds)
}

/// How the library is asked to build its kernels: the one place that says which of them are measured.
fn gpu_options(adapter: &Adapter, variant: Option<KernelVariant>) -> GpuOptions {
    GpuOptions {
        variant,
        matrix: adapter.matrix(),
        ..GpuOptions::default()
    }
}

enum OpenError {
    Unusable(String),
    Bench(tqbench::Error),
}

impl From<tqbench::Error> for OpenError {
    fn from(error: tqbench::Error) -> Self {
        Self::Bench(error)
    }
}

fn open(adapter: &Adapter, variant: Option<KernelVariant>) -> Result<Gpu, OpenError> {
    adapter
        .open_with(STAMP_FEATURES, gpu_options(adapter, variant))
        .map_err(OpenError::Unusable)
}

fn driver(adapter: &Adapter) -> String {
    format!("{} {}", adapter.info.driver, adapter.info.driver_info)
}

fn shapes(name: Option<&str>) -> Result<Vec<shape::Shape>> {
    Ok(match name {
        None => shape::grid().collect(),
        Some(name) => shape::select(name)?,
    })
}

fn kernels(name: Option<&str>) -> Result<Vec<Kernel>> {
    let Some(name) = name else {
        return Ok(Kernel::ALL.to_vec());
    };
    let kernel = Kernel::by_name(name).with_context(|| {
        let names = Kernel::ALL.map(Kernel::name).join(", ");
        format!("no kernel \"{name}\"; there are: {names}")
    })?;
    Ok(vec![kernel])
}

fn baselines(list: Option<&str>) -> Result<Vec<Baseline>> {
    let built_in = Baseline::ALL.into_iter().filter(|b| b.setup().is_some());
    let list = match list {
        None => return Ok(built_in.collect()),
        Some("none") => return Ok(Vec::new()),
        Some(list) => list,
    };
    let one = |name: &str| {
        let known = Baseline::ALL.map(Baseline::name).join(", ");
        let baseline = Baseline::by_name(name)
            .with_context(|| format!("no baseline \"{name}\"; there are: none, {known}"))?;
        ensure!(
            baseline.setup().is_some(),
            "the baseline {name} is not built in: build with --features bench-{name}"
        );
        Ok(baseline)
    };
    list.split(',').map(str::trim).map(one).collect()
}

/// Says what goes on while it does: a run takes minutes.
fn tell(event: Event<'_>) {
    match event {
        Event::Begun(implementation, job) => {
            tracing::info!(implementation, kernel = job.kernel.name(), shape = %job.shape, rows = job.rows);
        }
        Event::Row(row) => {
            let ratios: String = row
                .baselines
                .iter()
                .map(|b| format!(", {} {:.2}x", b.name, b.ratio))
                .collect();
            println!(
                "{} {} rows {}: {}{ratios}",
                row.kernel.name(),
                row.shape,
                row.rows,
                time(row.measured.time.median_ns)
            );
        }
        Event::Skipped(skipped) => println!(
            "{} {} rows {}: {} skipped: {}",
            skipped.kernel.name(),
            skipped.shape,
            skipped.rows,
            skipped.implementation,
            skipped.reason
        ),
    }
}

/// What `growth.json` holds.
#[derive(Serialize)]
struct Growth {
    adapter: String,
    driver: String,
    git_revision: Option<String>,
    date: String,
    series: Vec<Series>,
}

fn tell_growth(series: &Series) {
    println!("{} ({})", series.name(), series.fixed);
    let mut table = table(["size", "median", "min", "cache", "allocated"]);
    for point in &series.points {
        let bytes = |n: u64| format!("{:.2} MB", n as f64 / 1e6);
        table.add_row([
            point.x.to_string(),
            time(point.time.median_ns),
            time(point.time.min_ns),
            bytes(point.cache_bytes),
            point.allocated_bytes.map_or_else(|| "–".to_owned(), bytes),
        ]);
    }
    println!("{table}");
    for bend in &series.bends {
        println!(
            "bend at {}: from {} to the power {:.2} to {:.2}",
            bend.x, series.axis, bend.before, bend.after
        );
    }
    if let Some(why) = &series.ended {
        println!("left out: {why}");
    }
}

/// A line of `growth.csv`.
#[derive(Serialize)]
struct Line {
    kernel: Kernel,
    axis: Axis,
    size: u32,
    median_ns: f64,
    min_ns: f64,
    clock: String,
    cache_bytes: u64,
    allocated_bytes: Option<u64>,
}

fn write_growth(dir: &Path, growth: &Growth) -> Result<()> {
    let write = |name: &str, bytes: &[u8]| {
        let path = dir.join(name);
        fs::write(&path, bytes).with_context(|| format!("writing {}", path.display()))
    };
    write("growth.json", &serde_json::to_vec_pretty(growth)?)?;
    let mut csv = csv::Writer::from_writer(Vec::new());
    for series in &growth.series {
        for point in &series.points {
            csv.serialize(Line {
                kernel: series.kernel,
                axis: series.axis,
                size: point.x,
                median_ns: point.time.median_ns,
                min_ns: point.time.min_ns,
                clock: point.timing.to_string(),
                cache_bytes: point.cache_bytes,
                allocated_bytes: point.allocated_bytes,
            })?;
        }
    }
    write("growth.csv", &csv.into_inner()?)?;
    for axis in [Axis::Sequence, Axis::Rows, Axis::Heads, Axis::Layers] {
        let drawings = [
            ("time", plot::time(&growth.series, axis)?),
            ("memory", plot::memory(&growth.series, axis)?),
        ];
        for (what, drawing) in drawings {
            if let Some(svg) = drawing {
                write(&format!("{what}-{axis}.svg"), svg.as_bytes())?;
            }
        }
    }
    println!("written to {}", dir.display());
    Ok(())
}

fn listed(rows: &[Row]) -> comfy_table::Table {
    let mut table = table([
        "kernel",
        "shape",
        "rows",
        "median",
        "min",
        "clock",
        "host's view",
        "GB/s",
        "times the floor",
        "baselines: median (ratio)",
    ]);
    for row in rows {
        let baselines: Vec<String> = row
            .baselines
            .iter()
            .map(|b| {
                let median = time(b.measured.time.median_ns);
                format!("{} {median} ({:.2}x)", b.name, b.ratio)
            })
            .collect();
        table.add_row([
            row.kernel.name().to_owned(),
            row.shape.clone(),
            row.rows.to_string(),
            time(row.measured.time.median_ns),
            time(row.measured.time.min_ns),
            row.measured.timing.to_string(),
            time(row.measured.host.median_ns),
            rate(row.gb_per_s),
            format!("{:.1}", row.floor_ratio),
            baselines.join(", "),
        ]);
    }
    table
}

fn left_out(skipped: &[Skipped]) -> comfy_table::Table {
    let mut table = table(["kernel", "shape", "rows", "implementation", "reason"]);
    for one in skipped {
        table.add_row([
            one.kernel.name().to_owned(),
            one.shape.clone(),
            one.rows.to_string(),
            one.implementation.to_owned(),
            one.reason.clone(),
        ]);
    }
    table
}

/// 10^9 bytes a second, to three digits.
fn rate(gb_per_s: f64) -> String {
    let decimals = match gb_per_s {
        r if r >= 100.0 => 0,
        r if r >= 1.0 => 2,
        r if r >= 0.1 => 3,
        _ => return format!("{gb_per_s:.1e}"),
    };
    format!("{gb_per_s:.decimals$}")
}

/// A time in the unit that suits it, to about four digits.
fn time(ns: f64) -> String {
    let (value, unit) = match ns {
        ns if ns < 1e3 => return format!("{ns:.0} ns"),
        ns if ns < 1e6 => (ns / 1e3, "µs"),
        ns if ns < 1e9 => (ns / 1e6, "ms"),
        ns => (ns / 1e9, "s"),
    };
    let decimals = if value < 10.0 { 2 } else { 1 };
    format!("{value:.decimals$} {unit}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_the_unit_that_suits_them() {
        for (ns, text) in [
            (512.0, "512 ns"),
            (1234.0, "1.23 µs"),
            (139_000.0, "139.0 µs"),
            (19.25e9, "19.2 s"),
        ] {
            assert_eq!(time(ns), text);
        }
    }

    #[test]
    fn rates_keep_their_digits() {
        for (gb_per_s, text) in [
            (4312.6, "4313"),
            (15.23, "15.23"),
            (0.115, "0.115"),
            (0.00023, "2.3e-4"),
        ] {
            assert_eq!(rate(gb_per_s), text);
        }
    }

    #[test]
    fn names_that_mean_nothing_are_refused() {
        let message = |e: anyhow::Error| format!("{e:#}");
        let kernel = kernels(Some("attention")).map_err(message);
        assert!(kernel.is_err_and(|e| e.contains("decode")));
        let baseline = baselines(Some("cuda")).map_err(message);
        assert!(baseline.is_err_and(|e| e.contains("cera")));
        assert!(shapes(Some("big")).is_err());
        assert!(baselines(Some("none")).is_ok_and(|list| list.is_empty()));
    }
}
