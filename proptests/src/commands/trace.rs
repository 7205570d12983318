//! `tqcheck trace`.

use std::fs;
use std::path::PathBuf;

use anyhow::{Context as _, Result, bail, ensure};
use safetensors::{Dtype, SafeTensors};
use turboquant_wgpu::twin::AttentionShape;
use turboquant_wgpu::{Gain, HeadDim, Rotation};

use super::{End, table};
use crate::adapters::{self, Device};
use crate::oracles::attention::{Depth, Key, Pass, Value};
use crate::oracles::{dequantise, encode_keys, encode_values, rotate_queries};
use crate::session::{Encoded, Session};
use crate::verdict::{Evidence, Failure, within};

/// Runs real queries, keys and values through every adapter, and says what the compression costs
///
/// FILE holds tensors `layerNN.q` [tokens, n_heads, head_dim], `layerNN.k` and `layerNN.v` [tokens,
/// n_kv_heads, head_dim] of f32. Encoding and attention are judged by the oracles. Then, for each layer, as the
/// device computed them: distortion ‖x − x̂‖²/‖x‖² of keys and values by their codes; for each gain the slope
/// and RMS error of scores over the visible pairs, and the error of the attention output against exact
/// attention, relative to its RMS; and bytes against f16.
#[derive(clap::Args)]
#[command(after_help = "Example: tqcheck trace testdata/real/smollm2-135m-qkv.safetensors")]
pub struct Args {
    /// A safetensors file of Q, K and V
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    /// Adapters whose backend, name or driver contains this text, or `all`
    #[arg(long, default_value = "all", value_name = "TEXT")]
    pub adapter: String,
    /// Seed of the rotations
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
}

/// One layer of the file.
struct Layer {
    index: u32,
    head_dim: HeadDim,
    tokens: u32,
    n_heads: u32,
    n_kv_heads: u32,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
}

/// What the compression of one layer costs.
struct Cost {
    key_distortion: f64,
    value_distortion: f64,
    gains: Vec<GainCost>,
    bytes: u64,
    f16_bytes: u64,
}

struct GainCost {
    gain: Gain,
    slope: f64,
    score_rms: f64,
    output_error: f64,
}

/// Runs the command.
///
/// # Errors
/// A file that cannot be read or lacks a tensor.
pub fn run(args: &Args) -> Result<End> {
    let name = args.file.display();
    let bytes = fs::read(&args.file).with_context(|| name.to_string())?;
    let layers = layers(&bytes).with_context(|| name.to_string())?;
    let devices = match adapters::select(&args.adapter) {
        Ok(devices) => devices,
        Err(why) => {
            eprintln!("tqcheck: {why}");
            return Ok(End::NoAdapter);
        }
    };
    let mut end = End::Holds;
    for device in devices {
        let mut report = table([
            "layer",
            "key distortion",
            "value distortion",
            "gain",
            "score slope",
            "score RMS error",
            "output error",
            "bytes",
            "f16 bytes",
            "ratio",
        ]);
        let mut all = Evidence::default();
        for layer in &layers {
            match measure(device, layer, args.seed) {
                Ok((cost, evidence)) => {
                    all.absorb(&evidence);
                    rows(&mut report, layer, &cost);
                }
                Err(failure) => {
                    end = End::Violation;
                    let why = match failure {
                        Failure::Violated(violation) => violation.to_string(),
                        Failure::NotChecked(reason) => format!("not checked: {reason}"),
                    };
                    println!("{}, layer {}: {why}", device.label, layer.index);
                }
            }
        }
        println!("{}", device.label);
        println!("{report}");
        println!(
            "{} values compared, {} of {} choices free, largest observed/bound {:.2e}\n",
            all.compared, all.free, all.discrete, all.largest
        );
    }
    Ok(end)
}

fn rows(report: &mut comfy_table::Table, layer: &Layer, cost: &Cost) {
    for (i, gain) in cost.gains.iter().enumerate() {
        let once = |text: String| if i == 0 { text } else { String::new() };
        report.add_row([
            once(format!("{:02}", layer.index)),
            once(format!("{:.4}", cost.key_distortion)),
            once(format!("{:.4}", cost.value_distortion)),
            format!("{:?}", gain.gain),
            format!("{:.3}", gain.slope),
            format!("{:.4}", gain.score_rms),
            format!("{:.4}", gain.output_error),
            once(cost.bytes.to_string()),
            once(cost.f16_bytes.to_string()),
            once(format!("{:.2}", cost.f16_bytes as f64 / cost.bytes as f64)),
        ]);
    }
}

/// The layers of a safetensors file, in order.
fn layers(bytes: &[u8]) -> Result<Vec<Layer>> {
    let file = SafeTensors::deserialize(bytes)?;
    let mut names: Vec<&str> = file
        .names()
        .into_iter()
        .filter_map(|n| n.strip_suffix(".k"))
        .collect();
    names.sort_unstable();
    ensure!(!names.is_empty(), "no tensor named layerNN.k");
    names
        .into_iter()
        .map(|name| {
            let index = name
                .strip_prefix("layer")
                .and_then(|n| n.parse().ok())
                .with_context(|| format!("tensor {name}.k: expected layerNN.k"))?;
            let (q_shape, q) = tensor(&file, &format!("{name}.q"))?;
            let (k_shape, k) = tensor(&file, &format!("{name}.k"))?;
            let (v_shape, v) = tensor(&file, &format!("{name}.v"))?;
            ensure!(
                k_shape == v_shape,
                "{name}: k is {k_shape:?}, v is {v_shape:?}"
            );
            ensure!(
                q_shape[0] == k_shape[0] && q_shape[2] == k_shape[2],
                "{name}: q is {q_shape:?}, k is {k_shape:?}: expected the same tokens and head_dim"
            );
            turboquant_wgpu::heads::query_heads_per_kv_head(q_shape[1], k_shape[1])?;
            Ok(Layer {
                index,
                head_dim: HeadDim::try_from(k_shape[2])?,
                tokens: k_shape[0],
                n_heads: q_shape[1],
                n_kv_heads: k_shape[1],
                q,
                k,
                v,
            })
        })
        .collect()
}

fn tensor(file: &SafeTensors<'_>, name: &str) -> Result<([u32; 3], Vec<f32>)> {
    let view = file
        .tensor(name)
        .with_context(|| format!("tensor {name}"))?;
    ensure!(
        view.dtype() == Dtype::F32,
        "{name} is {:?}: expected F32",
        view.dtype()
    );
    let &[tokens, heads, head_dim] = view.shape() else {
        bail!(
            "{name} has shape {:?}: expected [tokens, heads, head_dim]",
            view.shape()
        );
    };
    let shape = [tokens, heads, head_dim].map(u32::try_from);
    let [Ok(tokens), Ok(heads), Ok(head_dim)] = shape else {
        bail!("{name}: shape {:?} is past u32", view.shape());
    };
    Ok((
        [tokens, heads, head_dim],
        bytemuck::pod_collect_to_vec(view.data()),
    ))
}

fn measure(device: &Device, layer: &Layer, seed: u64) -> Result<(Cost, Evidence), Failure> {
    let rotation = Rotation::new(layer.head_dim, seed, layer.index);
    let session = Session {
        device,
        head_dim: layer.head_dim,
        n_kv_heads: layer.n_kv_heads,
        n_heads: layer.n_heads,
        layer: layer.index,
        seed,
    };
    let mut evidence = Evidence::default();
    let encoded = session.encode(&layer.k, &layer.v)?;
    let d = layer.head_dim.get();
    for t in 0..layer.tokens {
        for head in 0..layer.n_kv_heads {
            let at = (t * layer.n_kv_heads + head) as usize * d;
            let record = (head * layer.tokens + t) as usize;
            let place = format!("layer {}, timestep {t}, head {head}", layer.index);
            let (x, found) = (&layer.k[at..at + d], &encoded.keys[record]);
            encode_keys::judge(
                device.arithmetic,
                &rotation,
                x,
                found,
                &mut evidence,
                &place,
            )?;
            let (x, found) = (&layer.v[at..at + d], &encoded.values[record]);
            encode_values::judge(
                device.arithmetic,
                &rotation,
                x,
                found,
                &mut evidence,
                &place,
            )?;
        }
    }
    let exact = Exact::new(layer);
    let mut gains = Vec::new();
    for gain in Gain::ALL {
        let shape = AttentionShape {
            rows: layer.tokens,
            n_heads: layer.n_heads,
            start_pos: 0,
            scale: layer.head_dim.inv_sqrt(),
            gain,
        };
        let out = session.attend(&encoded, &layer.q, shape)?;
        judge(
            device,
            layer,
            &rotation,
            &encoded,
            &shape,
            &out,
            &mut evidence,
        )?;
        let (slope, score_rms) = exact.scores(layer, &rotation, &encoded, gain);
        gains.push(GainCost {
            gain,
            slope,
            score_rms,
            output_error: exact.output_error(&out),
        });
    }
    let cost = Cost {
        key_distortion: distortion(layer, &layer.k, |record| {
            let key = &encoded.keys[record];
            dequantise::value(
                &rotation,
                &turboquant_wgpu::twin::ValueRecord {
                    codes: key.codes.clone(),
                    norm: key.norm,
                },
            )
        }),
        value_distortion: distortion(layer, &layer.v, |record| {
            dequantise::value(&rotation, &encoded.values[record])
        }),
        gains,
        bytes: encoded.bytes,
        f16_bytes: 2 * (layer.k.len() + layer.v.len()) as u64,
    };
    Ok((cost, evidence))
}

fn judge(
    device: &Device,
    layer: &Layer,
    rotation: &Rotation,
    encoded: &Encoded,
    shape: &AttentionShape,
    out: &[f32],
    evidence: &mut Evidence,
) -> Result<(), Failure> {
    let d = layer.head_dim.get();
    let group = layer.n_heads / layer.n_kv_heads;
    let keys: Vec<Key> = encoded.keys.iter().map(|k| Key::new(rotation, k)).collect();
    let values: Vec<Value> = encoded
        .values
        .iter()
        .map(|v| Value::new(rotation, v))
        .collect();
    let variant = device.gpu.variant(rotation.head_dim())?;
    for row in 0..layer.tokens as usize {
        for head in 0..layer.n_heads {
            let at = (row * layer.n_heads as usize + head as usize) * d;
            let first = (head / group * layer.tokens) as usize;
            let visible = first..first + row + 1;
            let q = &layer.q[at..at + d];
            let polar = rotate_queries::polar(device.arithmetic, rotation, q);
            let jl = rotate_queries::jl(device.arithmetic, rotation, &polar);
            let pass = Pass {
                arithmetic: device.arithmetic,
                rotation,
                depth: Depth::of_variant(variant, d, row + 1, row + 1),
                scale: shape.scale,
                gain: shape.gain,
            };
            let keys = &keys[visible.clone()];
            let reference = pass
                .attention(&polar, &jl, keys, &values[visible])
                .ok_or_else(|| Failure::NotChecked("a score past f32".to_owned()))?;
            let expected = reference.out.values.iter().zip(&reference.out.errors);
            for (i, (&found, (&expected, &bound))) in
                out[at..at + d].iter().zip(expected).enumerate()
            {
                within("attention", evidence, found, expected, bound, || {
                    format!("layer {}, row {row}, head {head}, element {i}", layer.index)
                })?;
            }
        }
    }
    Ok(())
}

/// Mean of ‖x − x̂‖²/‖x‖² over the vectors of a tensor.
fn distortion(layer: &Layer, x: &[f32], dequantised: impl Fn(usize) -> Vec<f64>) -> f64 {
    let d = layer.head_dim.get();
    let mut sum = 0.0;
    let mut n = 0.0;
    for (index, x) in x.chunks_exact(d).enumerate() {
        let (t, head) = (
            index / layer.n_kv_heads as usize,
            index % layer.n_kv_heads as usize,
        );
        let approximation = dequantised(head * layer.tokens as usize + t);
        let norm: f64 = x.iter().map(|&v| f64::from(v).powi(2)).sum();
        let off: f64 = x
            .iter()
            .zip(&approximation)
            .map(|(&v, a)| (f64::from(v) - a).powi(2))
            .sum();
        if norm > 0.0 {
            sum += off / norm;
            n += 1.0;
        }
    }
    sum / n
}

/// Attention on the uncompressed vectors, in f64.
struct Exact {
    out: Vec<f64>,
}

/// The query heads' rows and the visible timesteps of their KV head.
fn pairs(layer: &Layer) -> impl Iterator<Item = (usize, usize, usize)> {
    let group = layer.n_heads / layer.n_kv_heads;
    let (n_heads, tokens) = (layer.n_heads, layer.tokens);
    (0..tokens).flat_map(move |row| {
        (0..n_heads).map(move |head| (row as usize, head as usize, (head / group) as usize))
    })
}

impl Exact {
    fn new(layer: &Layer) -> Self {
        let d = layer.head_dim.get();
        let n_kv = layer.n_kv_heads as usize;
        let scale = 1.0 / (d as f64).sqrt();
        let mut out = Vec::with_capacity(layer.q.len());
        for (row, head, kv_head) in pairs(layer) {
            let q = &layer.q[(row * layer.n_heads as usize + head) * d..][..d];
            let scores: Vec<f64> = (0..=row)
                .map(|t| scale * dot(q, &layer.k[(t * n_kv + kv_head) * d..][..d]))
                .collect();
            let maximum = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let weights: Vec<f64> = scores.iter().map(|s| (s - maximum).exp()).collect();
            let sum: f64 = weights.iter().sum();
            let mut o = vec![0.0; d];
            for (t, w) in weights.iter().enumerate() {
                let v = &layer.v[(t * n_kv + kv_head) * d..][..d];
                for (o, &v) in o.iter_mut().zip(v) {
                    *o += w / sum * f64::from(v);
                }
            }
            out.extend(o);
        }
        Self { out }
    }

    /// Slope of the compressed scores on the exact ones, and RMS of their difference, over the
    /// visible pairs, scaled by 1/√d.
    fn scores(
        &self,
        layer: &Layer,
        rotation: &Rotation,
        encoded: &Encoded,
        gain: Gain,
    ) -> (f64, f64) {
        let d = layer.head_dim.get();
        let scale = 1.0 / (d as f64).sqrt();
        let keys: Vec<Vec<f64>> = encoded
            .keys
            .iter()
            .map(|record| dequantise::key(rotation, record, gain))
            .collect();
        let (mut xy, mut xx, mut off, mut n) = (0.0, 0.0, 0.0, 0.0);
        for (row, head, kv_head) in pairs(layer) {
            let q = &layer.q[(row * layer.n_heads as usize + head) * d..][..d];
            for t in 0..=row {
                let k = &layer.k[(t * layer.n_kv_heads as usize + kv_head) * d..][..d];
                let exact = scale * dot(q, k);
                let key = &keys[kv_head * layer.tokens as usize + t];
                let estimate: f64 = scale
                    * q.iter()
                        .zip(key)
                        .map(|(&q, k)| f64::from(q) * k)
                        .sum::<f64>();
                xy += exact * estimate;
                xx += exact * exact;
                off += (exact - estimate).powi(2);
                n += 1.0;
            }
        }
        (xy / xx, (off / n).sqrt())
    }

    /// RMS of the output's error over the RMS of the exact output.
    fn output_error(&self, out: &[f32]) -> f64 {
        let (mut off, mut size) = (0.0, 0.0);
        for (&found, exact) in out.iter().zip(&self.out) {
            off += (f64::from(found) - exact).powi(2);
            size += exact.powi(2);
        }
        (off / size).sqrt()
    }
}

fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter()
        .zip(b)
        .map(|(&a, &b)| f64::from(a) * f64::from(b))
        .sum()
}
