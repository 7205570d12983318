//! `tqcheck adapters`.

use anyhow::Result;

use turboquant_wgpu::KernelVariant;

use super::{End, table};
use crate::adapters::{Adapter, Device, all, missing};
use crate::arithmetic::Arithmetic;
use crate::probes::Probe;

/// Lists every adapter with its backend, driver, subgroup sizes and the limits that matter, and why one
/// is unusable
#[derive(clap::Args)]
#[command(after_help = "Example: tqcheck adapters --probe --require vulkan,gl")]
pub struct Args {
    /// Fail (exit code 3) unless each of these backends has a usable adapter
    #[arg(long, value_name = "BACKENDS")]
    pub require: Option<String>,
    /// Measure what the error bounds assume: the largest error of each primitive beside its limit
    #[arg(long)]
    pub probe: bool,
    /// Only adapters whose backend, name or driver contains this text
    #[arg(long, default_value = "all", value_name = "TEXT")]
    pub adapter: String,
}

/// Runs the command.
///
/// # Errors
/// None.
pub fn run(args: &Args) -> Result<End> {
    let mut usable = false;
    for adapter in all().iter().filter(|a| a.matches(&args.adapter)) {
        println!("{}", adapter.label());
        println!("{}", describe(adapter));
        if let Ok(device) = adapter.device() {
            usable = true;
            if args.probe {
                println!("{}", probed(device));
            }
        }
    }
    if all().is_empty() {
        println!("no adapter");
    }
    let missing = missing(args.require.as_deref().unwrap_or_default());
    if !missing.is_empty() {
        println!("absent: no usable adapter for {}", missing.join(", "));
        return Ok(End::NoAdapter);
    }
    Ok(if usable { End::Holds } else { End::NoAdapter })
}

fn describe(adapter: &Adapter) -> comfy_table::Table {
    let info = &adapter.info;
    let limits = adapter.limits();
    let mut table = table(["", ""]);
    let mut row = |name: &str, value: String| {
        table.add_row([name.to_owned(), value]);
    };
    row("driver", format!("{} {}", info.driver, info.driver_info));
    row("device type", format!("{:?}", info.device_type));
    let subgroups = if adapter.features().contains(wgpu::Features::SUBGROUP) {
        format!("{} to {}", info.subgroup_min_size, info.subgroup_max_size)
    } else {
        "none".to_owned()
    };
    row("subgroup size", subgroups);
    let matrix = adapter.matrix().map_or("none", KernelVariant::name);
    row("matrix variant", matrix.to_owned());
    row("max_buffer_size", limits.max_buffer_size.to_string());
    row(
        "max_storage_buffer_binding_size",
        limits.max_storage_buffer_binding_size.to_string(),
    );
    row(
        "max_storage_buffers_per_shader_stage",
        limits.max_storage_buffers_per_shader_stage.to_string(),
    );
    row(
        "min_storage_buffer_offset_alignment",
        limits.min_storage_buffer_offset_alignment.to_string(),
    );
    row(
        "max_compute_workgroup_storage_size",
        limits.max_compute_workgroup_storage_size.to_string(),
    );
    row(
        "max_compute_invocations_per_workgroup",
        limits.max_compute_invocations_per_workgroup.to_string(),
    );
    row(
        "max_compute_workgroups_per_dimension",
        limits.max_compute_workgroups_per_dimension.to_string(),
    );
    match adapter.device() {
        Ok(device) => {
            let rounding = if device.arithmetic == Arithmetic::NEAREST {
                "to nearest (u = 2^-24)"
            } else {
                "to either neighbour (u = 2^-23)"
            };
            row("rounding", rounding.to_owned());
            row("usable", "yes, self-test passed".to_owned());
        }
        Err(why) => row("usable", format!("no: {why}")),
    }
    table
}

fn probed(device: &Device) -> comfy_table::Table {
    let mut table = table(["probe", "seen", "limit", "unit", "kept", "note"]);
    for probe in &device.probes().list {
        let kept = match (probe.kept, &probe.carries()[..]) {
            (true, _) => "yes",
            (false, []) => "NO (no kernel rests on it)",
            (false, _) => "NO",
        };
        table.add_row([
            probe.title(),
            probe.seen.to_string(),
            limit(probe),
            probe.unit.clone(),
            kept.to_owned(),
            probe.note.clone(),
        ]);
    }
    table
}

fn limit(probe: &Probe) -> String {
    probe.limit.map_or_else(String::new, |l| l.to_string())
}
