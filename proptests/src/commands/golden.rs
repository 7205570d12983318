//! `tqcheck golden`.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};
use serde::Deserialize;
use turboquant_wgpu::blob::decode_kind;
use turboquant_wgpu::layout::Kind;
use turboquant_wgpu::twin::{self, AttentionShape, KeyRecord, ValueRecord};
use turboquant_wgpu::{Gain, HeadDim, Rotation};

use super::{End, table};
use crate::adapters::{self, Device};
use crate::arithmetic::Arithmetic;
use crate::oracles::attention::{Depth, Key, Pass, Value};
use crate::oracles::{encode_keys, encode_values, rotate_queries};
use crate::verdict::{Evidence, Failure, Violation, within};

/// Checks directories of golden cases against the CPU twin and every adapter
///
/// Each directory, or each below it, holds case.toml, k.f32, v.f32, keys.tqk1, values.tqv1 and, with
/// attention, q.f32 and attention.f32 (gain `cera`, causal, scale 1/√head_dim). The twin's blobs have to
/// be the given bytes; a device's have to be them but for free choices; attention has to be within its bound.
#[derive(clap::Args)]
#[command(after_help = "Example: tqcheck golden testdata/golden")]
pub struct Args {
    /// Directories of golden cases
    #[arg(required = true, value_name = "DIR")]
    pub dirs: Vec<PathBuf>,
    /// Adapters whose backend, name or driver contains this text, or `all`
    #[arg(long, default_value = "all", value_name = "TEXT")]
    pub adapter: String,
}

/// `case.toml` of a golden case.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Golden {
    #[expect(dead_code, reason = "it tells a reader where the data came from")]
    family: String,
    head_dim: u32,
    n_kv_heads: u32,
    n_heads: u32,
    seq_len: u32,
    seed: u64,
    layer: u32,
    rotation_seed: u64,
    attention: bool,
}

/// A golden case with its files.
struct Files {
    golden: Golden,
    head_dim: HeadDim,
    rotation: Rotation,
    k: Vec<f32>,
    v: Vec<f32>,
    keys: Vec<u8>,
    values: Vec<u8>,
    q: Vec<f32>,
    attention: Vec<f32>,
}

/// Runs the command.
///
/// # Errors
/// A directory that holds no golden case, or one that cannot be read.
pub fn run(args: &Args) -> Result<End> {
    let mut cases = Vec::new();
    for dir in &args.dirs {
        let before = cases.len();
        for case in directories(dir)? {
            let files = Files::read(&case).with_context(|| case.display().to_string())?;
            cases.push((case, files));
        }
        ensure!(
            cases.len() > before,
            "{}: no case.toml in it or below it",
            dir.display()
        );
    }
    let devices = match adapters::select(&args.adapter) {
        Ok(devices) => devices,
        Err(why) => {
            eprintln!("tqcheck: {why}");
            return Ok(End::NoAdapter);
        }
    };
    let mut report = table([
        "case",
        "on",
        "verdict",
        "free choices",
        "largest observed/bound",
    ]);
    let mut end = End::Holds;
    for (path, files) in &cases {
        let name = path.file_name().map_or_else(
            || path.display().to_string(),
            |n| n.to_string_lossy().into_owned(),
        );
        let mut add = |on: &str, outcome: Result<Evidence, Failure>| {
            let row = match outcome {
                Ok(e) => [
                    name.clone(),
                    on.to_owned(),
                    "holds".to_owned(),
                    format!("{} of {}", e.free, e.discrete),
                    format!("{:.2e}", e.largest),
                ],
                Err(failure) => {
                    end = End::Violation;
                    let why = match failure {
                        Failure::Violated(violation) => violation.to_string(),
                        Failure::NotChecked(reason) => reason,
                    };
                    println!("{name} on {on}: {why}");
                    let failed = "VIOLATED".to_owned();
                    [
                        name.clone(),
                        on.to_owned(),
                        failed,
                        String::new(),
                        String::new(),
                    ]
                }
            };
            report.add_row(row);
        };
        add("twin", files.check_twin());
        for device in &devices {
            add(&device.label, files.check_device(device));
        }
    }
    println!("{report}");
    println!(
        "{} golden cases, twin and {} adapters",
        cases.len(),
        devices.len()
    );
    Ok(end)
}

/// The directories with a case.toml: `dir` itself, or those in it.
fn directories(dir: &Path) -> Result<Vec<PathBuf>> {
    if dir.join("case.toml").is_file() {
        return Ok(vec![dir.to_owned()]);
    }
    let mut found: Vec<PathBuf> = fs::read_dir(dir)
        .with_context(|| dir.display().to_string())?
        .filter_map(|entry| entry.ok().map(|e| e.path()))
        .filter(|path| path.join("case.toml").is_file())
        .collect();
    found.sort();
    Ok(found)
}

fn floats(path: &Path, expected: usize) -> Result<Vec<f32>> {
    let bytes = fs::read(path).with_context(|| path.display().to_string())?;
    ensure!(
        bytes.len() == 4 * expected,
        "{}: found {} bytes, expected {}",
        path.display(),
        bytes.len(),
        4 * expected
    );
    Ok(bytemuck::pod_collect_to_vec(&bytes))
}

impl Files {
    fn read(dir: &Path) -> Result<Self> {
        let text = fs::read_to_string(dir.join("case.toml"))?;
        let golden: Golden = toml::from_str(&text).context("case.toml")?;
        let head_dim = HeadDim::try_from(golden.head_dim)?;
        ensure!(
            golden.seed ^ u64::from(golden.layer) == golden.rotation_seed,
            "case.toml: rotation_seed {} is not seed {} XOR layer {}",
            golden.rotation_seed,
            golden.seed,
            golden.layer
        );
        let vector = golden.seq_len as usize * head_dim.get();
        let kv = vector * golden.n_kv_heads as usize;
        let q = vector * golden.n_heads as usize;
        let optional = |name: &str| {
            if golden.attention {
                floats(&dir.join(name), q)
            } else {
                Ok(Vec::new())
            }
        };
        Ok(Self {
            head_dim,
            rotation: Rotation::from_rotation_seed(head_dim, golden.rotation_seed),
            k: floats(&dir.join("k.f32"), kv)?,
            v: floats(&dir.join("v.f32"), kv)?,
            keys: fs::read(dir.join("keys.tqk1")).context("keys.tqk1")?,
            values: fs::read(dir.join("values.tqv1")).context("values.tqv1")?,
            q: optional("q.f32")?,
            attention: optional("attention.f32")?,
            golden,
        })
    }

    fn shape(&self) -> AttentionShape {
        AttentionShape {
            rows: self.golden.seq_len,
            n_heads: self.golden.n_heads,
            start_pos: 0,
            scale: self.head_dim.inv_sqrt(),
            gain: Gain::Cera,
        }
    }

    /// The twin's bytes are the given ones; the twin's and the given attention are within the twin's bound.
    fn check_twin(&self) -> Result<Evidence, Failure> {
        let (snapshot, ..) =
            twin::snapshot(&self.rotation, self.golden.n_kv_heads, &self.k, &self.v)?;
        for (what, found, expected) in [
            ("keys.tqk1", &snapshot.keys, &self.keys),
            ("values.tqv1", &snapshot.values, &self.values),
        ] {
            if let Some(i) = first_difference(found, expected) {
                return Err(Failure::Violated(Violation {
                    rule: "the twin's bytes are the golden ones",
                    place: format!("{what}, byte {i}"),
                    detail: format!("{} bytes against {} expected", found.len(), expected.len()),
                }));
            }
        }
        let mut evidence = Evidence {
            compared: (self.keys.len() + self.values.len()) as u64,
            ..Evidence::default()
        };
        if self.golden.attention {
            let keys = decode_kind(Kind::Keys, &self.keys).map_err(turboquant_wgpu::Error::from)?;
            let values =
                decode_kind(Kind::Values, &self.values).map_err(turboquant_wgpu::Error::from)?;
            let out = twin::attention(&self.rotation, &keys, &values, &self.q, &self.shape())?;
            let keys = KeyRecord::read_all(&keys, self.head_dim);
            let values = ValueRecord::read_all(&values, self.head_dim);
            for (rule, out) in [
                ("twin attention", &out),
                ("golden attention", &self.attention),
            ] {
                self.judge(rule, Arithmetic::TWIN, &keys, &values, out, &mut evidence)?;
            }
        }
        Ok(evidence)
    }

    /// A device's records are right, and so is its attention over its own records.
    fn check_device(&self, device: &Device) -> Result<Evidence, Failure> {
        let arithmetic = device.arithmetic;
        let run = crate::session::Session {
            device,
            head_dim: self.head_dim,
            n_kv_heads: self.golden.n_kv_heads,
            n_heads: self.golden.n_heads,
            layer: self.golden.layer,
            seed: self.golden.seed,
        };
        let mut evidence = Evidence::default();
        let encoded = run.encode(&self.k, &self.v)?;
        let n_kv_heads = self.golden.n_kv_heads;
        for t in 0..self.golden.seq_len {
            for head in 0..n_kv_heads {
                let at = (t * n_kv_heads + head) as usize * self.head_dim.get();
                let record = (head * self.golden.seq_len + t) as usize;
                let range = at..at + self.head_dim.get();
                let place = format!("timestep {t}, head {head}");
                encode_keys::judge(
                    arithmetic,
                    &self.rotation,
                    &self.k[range.clone()],
                    &encoded.keys[record],
                    &mut evidence,
                    &place,
                )?;
                encode_values::judge(
                    arithmetic,
                    &self.rotation,
                    &self.v[range],
                    &encoded.values[record],
                    &mut evidence,
                    &place,
                )?;
            }
        }
        if self.golden.attention {
            let out = run.attend(&encoded, &self.q, self.shape())?;
            self.judge(
                "attention",
                arithmetic,
                &encoded.keys,
                &encoded.values,
                &out,
                &mut evidence,
            )?;
        }
        Ok(evidence)
    }

    fn judge(
        &self,
        rule: &'static str,
        arithmetic: Arithmetic,
        keys: &[KeyRecord],
        values: &[ValueRecord],
        out: &[f32],
        evidence: &mut Evidence,
    ) -> Result<(), Failure> {
        let d = self.head_dim.get();
        let group = self.golden.n_heads / self.golden.n_kv_heads;
        let seq_len = self.golden.seq_len as usize;
        let keys: Vec<Key> = keys.iter().map(|k| Key::new(&self.rotation, k)).collect();
        let values: Vec<Value> = values
            .iter()
            .map(|v| Value::new(&self.rotation, v))
            .collect();
        for row in 0..seq_len {
            for head in 0..self.golden.n_heads {
                let at = (row * self.golden.n_heads as usize + head as usize) * d;
                let first = (head / group) as usize * seq_len;
                let visible = first..first + row + 1;
                let depth = if arithmetic.sequential {
                    Depth::twin(d, row + 1)
                } else {
                    Depth::kernel(d, row + 1, row + 1)
                };
                let q = &self.q[at..at + d];
                let polar = rotate_queries::polar(arithmetic, &self.rotation, q);
                let jl = rotate_queries::jl(arithmetic, &self.rotation, &polar);
                let pass = Pass {
                    arithmetic,
                    rotation: &self.rotation,
                    depth,
                    scale: self.head_dim.inv_sqrt(),
                    gain: Gain::Cera,
                };
                let reference = pass
                    .attention(&polar, &jl, &keys[visible.clone()], &values[visible])
                    .ok_or_else(|| Failure::NotChecked("a score past f32".to_owned()))?;
                let expected = reference.out.values.iter().zip(&reference.out.errors);
                for (i, (&found, (&expected, &bound))) in
                    out[at..at + d].iter().zip(expected).enumerate()
                {
                    within(rule, evidence, found, expected, bound, || {
                        format!("row {row}, head {head}, element {i}")
                    })?;
                }
            }
        }
        Ok(())
    }
}

fn first_difference(a: &[u8], b: &[u8]) -> Option<usize> {
    if a == b {
        return None;
    }
    let common = a.iter().zip(b).position(|(x, y)| x != y);
    Some(common.unwrap_or(a.len().min(b.len())))
}
