//! `tqcheck inspect`.

use std::fs::File;
use std::io::Read;
use std::path::PathBuf;

use anyhow::{Context as _, Result};
use turboquant_wgpu::BlobHeader;
use turboquant_wgpu::blob::{Blob, decode};
use turboquant_wgpu::layout::{BlobRegion, Kind};

use super::{End, table};

/// Shows a snapshot blob's header, sizes, norms and codes, or why it is no blob
#[derive(clap::Args)]
#[command(after_help = "Example: tqcheck inspect testdata/golden/d128-gauss/keys.tqk1")]
pub struct Args {
    /// A file that holds a TQK1 or TQV1 blob
    #[arg(value_name = "BLOB")]
    pub blob: PathBuf,
}

/// Runs the command.
///
/// # Errors
/// A file that cannot be read.
pub fn run(args: &Args) -> Result<End> {
    let name = args.blob.display();
    let mut file = File::open(&args.blob).with_context(|| name.to_string())?;
    let length = file.metadata()?.len();
    // The header and the length decide before anything more is read: a wrong file may be huge.
    let mut bytes = Vec::new();
    file.by_ref().take(16).read_to_end(&mut bytes)?;
    if let Err(error) = BlobHeader::parse(&bytes, length) {
        println!("{name}: no blob: {error}");
        return Ok(End::Violation);
    }
    file.read_to_end(&mut bytes)?;
    match decode(&bytes) {
        Ok(blob) => {
            println!("{name}");
            println!("{}", describe(&blob));
            Ok(End::Holds)
        }
        Err(error) => {
            println!("{name}: no blob: {error}");
            Ok(End::Violation)
        }
    }
}

fn describe(blob: &Blob<'_>) -> comfy_table::Table {
    let header = blob.header();
    let mut table = table(["", ""]);
    let mut row = |name: &str, value: String| {
        table.add_row([name.to_owned(), value]);
    };
    let magic = match header.kind {
        Kind::Keys => "TQK1 (keys)",
        Kind::Values => "TQV1 (values)",
    };
    row("magic", magic.to_owned());
    row("n_kv_heads", header.n_kv_heads.to_string());
    row("head_dim", header.head_dim.to_string());
    row("seq_len", header.seq_len.to_string());
    let bytes = blob.as_bytes().len();
    row("bytes", bytes.to_string());
    let elements =
        u128::from(header.n_kv_heads) * u128::from(header.head_dim) * u128::from(header.seq_len);
    if elements > 0 {
        let ratio = 2.0 * elements as f64 / bytes as f64;
        row(
            "f16 would take",
            format!("{} ({ratio:.2} times as much)", 2 * elements),
        );
    }
    for (region, name) in [
        (BlobRegion::Norms, "norms"),
        (BlobRegion::ResidualNorms, "residual norms"),
    ] {
        if let Some(bytes) = blob.region(region) {
            row(name, norms(bytes));
        }
    }
    if let Some(codes) = blob.region(BlobRegion::Codes) {
        let mut histogram = [0_u64; 4];
        for byte in codes {
            for i in 0..4 {
                histogram[usize::from(byte >> (2 * i) & 3)] += 1;
            }
        }
        let all = histogram.iter().sum::<u64>().max(1) as f64;
        let parts: Vec<String> = (0..4)
            .map(|c| format!("{c}: {:.2} %", 100.0 * histogram[c] as f64 / all))
            .collect();
        row("codes", parts.join("  "));
    }
    if let Some(signs) = blob.region(BlobRegion::Signs) {
        let set: u64 = signs.iter().map(|b| u64::from(b.count_ones())).sum();
        let all = (8 * signs.len()).max(1) as f64;
        row("signs set", format!("{:.2} %", 100.0 * set as f64 / all));
    }
    table
}

fn norms(bytes: &[u8]) -> String {
    let values: Vec<f64> = bytes
        .chunks_exact(2)
        .map(|b| f64::from(half::f16::from_le_bytes([b[0], b[1]])))
        .collect();
    if values.is_empty() {
        return "none".to_owned();
    }
    let mean = values.iter().sum::<f64>() / values.len() as f64;
    let (low, high) = values
        .iter()
        .fold((f64::INFINITY, 0.0_f64), |(low, high), &v| {
            (low.min(v), high.max(v))
        });
    let zero = values.iter().filter(|&&v| v == 0.0).count();
    let saturated = values.iter().filter(|&&v| v == 65504.0).count();
    format!("{low:.4} to {high:.4}, mean {mean:.4}; {zero} zero, {saturated} saturated")
}
