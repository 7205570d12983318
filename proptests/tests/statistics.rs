//! The statistics on the CPU twin: the table holds, and planted faults are seen.

use rayon::prelude::*;
use tqcheck::arithmetic::rht;
use tqcheck::inputs::{Context, Data, Family, generate};
use tqcheck::statistics::{
    HEADS, LAYERS, Observation, Streams, Vectors, directions, judge, judge_streams,
};
use tqcheck::verdict::{Evidence, Violation};
use turboquant_wgpu::twin::{self, KeyRecord};
use turboquant_wgpu::{Gain, HeadDim, Rotation, Signs};

type Layer = (Rotation, Vec<Vectors>);

/// Fewer than a property takes, still enough to see 5 %.
const TWIN_LAYERS: u32 = 3;

/// A sample as the twin makes it, under these rotations.
fn sample(head_dim: HeadDim, rotations: impl Fn(u32) -> Rotation) -> Vec<Layer> {
    (0..TWIN_LAYERS)
        .map(|layer| {
            let rotation = rotations(layer);
            let random = |seed: u64| {
                let context = Context {
                    rotation: &rotation,
                    rows: 1,
                    heads: HEADS as u32,
                };
                let data = Data::new(Family::Normal, 3 * u64::from(layer) + seed);
                directions(head_dim, &generate(&data, &context).expect("normal fits"))
            };
            let tensors = [random(0), random(1), random(2)];
            let vectors = (0..HEADS)
                .into_par_iter()
                .map(|head| {
                    let d = head_dim.get();
                    let [k, u, v] =
                        [0, 1, 2].map(|i| tensors[i][head * d..(head + 1) * d].to_vec());
                    Vectors {
                        key: twin::encode_keys(&rotation, &k).0,
                        value: twin::encode_values(&rotation, &v).0,
                        k,
                        u,
                        v,
                    }
                })
                .collect();
            (rotation, vectors)
        })
        .collect()
}

/// Scores of the queries k, u and along the residual: the codes' part, and the signs' part to be multiplied by
/// the gain.
fn scores(rotation: &Rotation, x: &Vectors) -> [(f64, f64); 3] {
    let head_dim = rotation.head_dim();
    let centroids = head_dim.codebook().centroids;
    let key = &x.key;
    let (norm, rho) = (f64::from(key.norm), f64::from(key.residual_norm));
    [x.k.clone(), x.u.clone(), x.residual_query(rotation)].map(|q| {
        let (query, _) = twin::rotate_queries(rotation, &q);
        let (mut codes, mut signs) = (0.0, 0.0);
        for i in 0..head_dim.get() {
            codes += f64::from(query.polar[i]) * f64::from(centroids[usize::from(key.code(i))]);
            signs += f64::from(if key.sign(i) {
                query.jl[i]
            } else {
                -query.jl[i]
            });
        }
        (norm * codes, norm * rho * signs)
    })
}

/// The twin's observations with scores of its own gain, then with each of these factors of the gain.
fn observe<const N: usize>(
    layers: &[Layer],
    gain: Gain,
    factors: [f64; N],
    spoil: impl Fn(&mut KeyRecord) + Sync,
) -> [Vec<Observation>; N] {
    let all = layers.iter().flat_map(|(rotation, vectors)| {
        let g = gain.factor_f64(rotation.head_dim());
        let d = rotation.head_dim().get() as f64;
        let spoil = &spoil;
        let observe = move |x: &Vectors| {
            let mut x = x.clone();
            spoil(&mut x.key);
            let parts = scores(rotation, &x);
            let ones = x.observe(
                rotation,
                gain,
                parts.map(|(codes, signs)| codes + g * signs),
            );
            let products =
                x.k.iter()
                    .zip(&x.u)
                    .map(|(&k, &u)| f64::from(k) * f64::from(u));
            let inner: f64 = products.sum();
            factors.map(|factor| {
                let score = parts.map(|(codes, signs)| codes + g * factor * signs);
                Observation {
                    slope: score[0],
                    error: d * (inner - score[1]).powi(2),
                    // The codes' part is taken out already.
                    response: ones.response
                        + (factor - 1.0) * g * parts[2].1 / f64::from(x.key.residual_norm),
                    ..ones
                }
            })
        };
        vectors.par_iter().map(observe).collect::<Vec<_>>()
    });
    let all: Vec<[Observation; N]> = all.collect();
    std::array::from_fn(|i| all.iter().map(|o| o[i]).collect())
}

fn verdict(head_dim: HeadDim, gain: Gain, sample: &[Observation]) -> Result<(), Violation> {
    judge(head_dim, gain, sample, &mut Evidence::default())
}

#[test]
fn the_twin_has_the_tabulated_moments_and_planted_gains_are_seen() {
    for head_dim in HeadDim::ALL {
        let layers = sample(head_dim, |layer| Rotation::new(head_dim, 77, layer));
        let root = (head_dim.get() as f64).sqrt();
        let factors = [
            1.0,
            root,
            1.0 / root,
            2.0_f64.sqrt(),
            0.5_f64.sqrt(),
            1.05,
            0.95,
        ];
        for gain in Gain::ALL {
            let [honest, wrong @ ..] = observe(&layers, gain, factors, |_| {});
            verdict(head_dim, gain, &honest).expect("the twin is right");
            for found in wrong {
                let seen = verdict(head_dim, gain, &found).expect_err("a wrong gain");
                assert_eq!(
                    seen.rule, "response of the scores",
                    "d = {head_dim}: {seen}"
                );
            }
            for other in Gain::ALL.into_iter().filter(|&g| g != gain) {
                assert!(
                    verdict(head_dim, other, &honest).is_err(),
                    "{other:?} for {gain:?}"
                );
            }
        }
        // One code of each key mirrored, and the signs of half the elements lost.
        let gain = Gain::Unbiased;
        let [mirrored] = observe(&layers, gain, [1.0], |key| key.codes[0] ^= 3);
        let seen = verdict(head_dim, gain, &mirrored).expect_err("wrong codes");
        assert_eq!(seen.rule, "distortion of keys");
        let half = head_dim.get() / 16;
        let [lost] = observe(&layers, gain, [1.0], |key| key.signs[half..].fill(0));
        assert!(verdict(head_dim, gain, &lost).is_err(), "lost signs");
        assert!(verdict(head_dim, gain, &[]).is_err(), "no vectors");
    }
}

/// Signs of `jl` that belong to another stream than the query's are noise, and seen as a lost response.
#[test]
fn records_and_queries_of_different_streams_are_seen() {
    let head_dim = HeadDim::D64;
    let shared = |layer| {
        let mut rotation = Rotation::new(head_dim, 5, layer);
        rotation.jl = rotation.polar;
        rotation
    };
    let mut layers = sample(head_dim, shared);
    for (layer, (rotation, _)) in layers.iter_mut().enumerate() {
        *rotation = Rotation::new(head_dim, 5, layer as u32);
    }
    let gain = Gain::Unbiased;
    let [found] = observe(&layers, gain, [1.0], |_| {});
    assert!(verdict(head_dim, gain, &found).is_err());
}

fn streams(head_dim: HeadDim, rotations: impl Fn(u32) -> Rotation) -> Result<(), Violation> {
    let layers: Vec<Streams> = (0..LAYERS as u32)
        .map(|layer| {
            let rotation = rotations(layer);
            let context = Context {
                rotation: &rotation,
                rows: 16,
                heads: 1,
            };
            let data = Data::new(Family::Normal, u64::from(layer));
            let queries = generate(&data, &context).expect("normal fits");
            let mut streams = Streams::new(head_dim);
            for q in queries.chunks_exact(head_dim.get()) {
                let exact: Vec<f64> = q.iter().map(|&v| f64::from(v)).collect();
                let polar = rht(&rotation.polar, &exact);
                let jl = rht(&rotation.jl, &polar);
                let [polar, jl] =
                    [polar, jl].map(|x| x.iter().map(|&v| v as f32).collect::<Vec<f32>>());
                streams.add(q, &polar, &jl);
            }
            streams
        })
        .collect();
    judge_streams(&layers, &mut Evidence::default())
}

#[test]
fn shared_and_constant_sign_streams_are_seen() {
    for head_dim in HeadDim::ALL {
        let right = |layer| Rotation::new(head_dim, 3, layer);
        streams(head_dim, right).expect("the streams are independent");
        let shared = |layer| {
            let mut rotation = right(layer);
            rotation.jl = rotation.polar;
            rotation
        };
        let seen = streams(head_dim, shared).expect_err("one stream for both");
        assert_eq!(seen.rule, "polar and jl are independent");
        let same_layers = streams(head_dim, |_| right(0)).expect_err("one stream for all layers");
        assert!(
            same_layers.rule.contains("between layers") || same_layers.rule.contains("balanced")
        );
        let constant = Signs::from_seed(head_dim, 9);
        let fixed = |layer| {
            let mut rotation = right(layer);
            rotation.polar = constant;
            rotation
        };
        assert!(streams(head_dim, fixed).is_err(), "polar without a seed");
    }
}
