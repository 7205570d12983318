//! `statistics`: what random vectors average to, on records and scores that the device made.

use rayon::prelude::*;

use super::attention::Records;
use crate::adapters::Device;
use crate::case::Case;
use crate::fixture::{Fixture, vector};
use crate::inputs::{Context, Data, Family, generate};
use crate::statistics::{
    HEADS, LAYERS, Observation, SCALE, Streams, Vectors, directions, judge, judge_streams,
};
use crate::verdict::{Evidence, Failure, Outcome, Violation};

/// Queries of a layer that its sign streams are read from.
const STREAM_QUERIES: usize = 16;
/// Queries of one key: itself, a random one, the residual.
const QUERIES: usize = 3;

/// Checks one sample.
pub fn check(device: &Device, case: &Case) -> Outcome {
    let mut sample = Vec::new();
    let mut streams = Vec::new();
    for layer in 0..LAYERS as u32 {
        let one = Case {
            n_heads: (QUERIES * HEADS) as u32,
            n_kv_heads: HEADS as u32,
            capacity: 2,
            rows: 2,
            encode_split: 2,
            layer,
            q_rows: 1,
            start_pos: 1,
            q_split: 1,
            kv_split: 0,
            scale: SCALE,
            ..case.clone()
        };
        let (observations, signs) = layer_of(device, &one)?;
        sample.extend(observations);
        streams.push(signs);
    }
    let mut evidence = Evidence::default();
    judge_streams(&streams, &mut evidence)?;
    judge(case.head_dim()?, case.gain, &sample, &mut evidence)?;
    Ok(evidence)
}

/// The statistics of one layer's vectors.
fn layer_of(device: &Device, case: &Case) -> Result<(Vec<Observation>, Streams), Failure> {
    let head_dim = case.head_dim()?;
    let d = head_dim.get();
    let rotation = case.rotation()?;
    let random = |which: u64| -> Result<Vec<f32>, Failure> {
        let context = Context {
            rotation: &rotation,
            rows: 1,
            heads: HEADS as u32,
        };
        let seed = (u64::from(case.cache_seed) << 16) + (u64::from(case.layer) << 2) + which;
        let tensor = generate(&Data::new(Family::Normal, seed), &context)?;
        Ok(directions(head_dim, &tensor))
    };
    let (k, u, v) = (random(0)?, random(1)?, random(2)?);

    // The first timestep is zero, so that its score and its value are.
    let after_zero = |x: &[f32]| [&vec![0.0; x.len()], x].concat();
    let mut fixture = Fixture::with(device, case, after_zero(&k), after_zero(&v))?;
    let mut encoder = device.encoder();
    fixture.encode_rows(&mut encoder, case.encode_split)?;
    let raw = fixture.read_raw(encoder)?;
    let Records { keys, values } = Records::read(&fixture, &raw)?;
    let vectors: Vec<Vectors> = (0..HEADS)
        .map(|head| Vectors {
            k: vector(&k, head_dim, head).to_vec(),
            u: vector(&u, head_dim, head).to_vec(),
            v: vector(&v, head_dim, head).to_vec(),
            key: keys[head][1].clone(),
            value: values[head][1].clone(),
        })
        .collect();

    let queries: Vec<f32> = vectors
        .par_iter()
        .flat_map_iter(|x| [x.k.clone(), x.u.clone(), x.residual_query(&rotation)].concat())
        .collect();
    let attended = fixture.attend(device.encoder(), &queries)?;
    let mut streams = Streams::new(head_dim);
    for index in 0..STREAM_QUERIES {
        let (polar, jl) = attended.rotated[2 * index * d..2 * (index + 1) * d].split_at(d);
        streams.add(vector(&queries, head_dim, index), polar, jl);
    }

    let observations = vectors
        .par_iter()
        .zip(attended.out.par_chunks_exact(QUERIES * d))
        .map(|(x, outs)| {
            let value = x.dequantised_value(&rotation);
            let size: f64 = value.iter().map(|v| v * v).sum();
            let score = |query: usize| {
                let out = vector(outs, head_dim, query);
                let along: f64 = out.iter().zip(&value).map(|(&o, v)| f64::from(o) * v).sum();
                // The weight of the second of two timesteps, the first of score 0: a logistic function.
                let weight = along / size;
                (weight / (1.0 - weight)).ln() / f64::from(SCALE)
            };
            let scores = [score(0), score(1), score(2)];
            if scores.iter().all(|s| s.is_finite()) {
                Ok(x.observe(&rotation, case.gain, scores))
            } else {
                Err(Violation {
                    rule: "two timesteps share the weight",
                    place: format!("layer {}", case.layer),
                    detail: format!("scores {scores:?} follow from the outputs"),
                })
            }
        })
        .collect::<Result<_, _>>()?;
    Ok((observations, streams))
}
