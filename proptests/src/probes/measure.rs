//! The probes: what to compute, from which inputs, and what is right.

use half::f16;
use turboquant_wgpu::shaders::{self, Kernel, KernelVariant};
use turboquant_wgpu::{Gpu, HeadDim};

use super::dispatch::{self, Program};
use super::draw::Draw;
use super::judge::{self, ROUNDINGS, roundings, ulp};
use super::{Probe, Seen};
use crate::adapters::Device;
use crate::arithmetic::Arithmetic;

const ARITHMETIC: &str = include_str!("../../shaders/probes.wgsl");
const MEMORY: &str = include_str!("../../shaders/probes_memory.wgsl");
const SUBGROUP: &str = include_str!("../../shaders/probes_subgroup.wgsl");

/// Inputs of an arithmetic probe.
const ITEMS: usize = 16_384;
/// Workgroups of `leave_rubbish` and `look`.
const SHARERS: usize = 64;

type Words = [u32; 4];

/// A float operation with a limit on its error.
struct Operation {
    name: &'static str,
    domain: &'static str,
    /// WGSL, of the item's floats `v` and words `words`.
    expression: &'static str,
    unit: &'static str,
    limit: f64,
    draw: fn(&mut Draw) -> [f32; 4],
    /// The exact value, and the size of the unit there.
    reference: fn([f64; 4]) -> (f64, f64),
}

fn in_ulp(exact: f64) -> (f64, f64) {
    (exact, ulp(exact))
}

fn exp(x: f64) -> (f64, f64) {
    let exact = x.exp();
    (exact, ulp(exact) * (3.0 + 2.0 * x.abs()))
}

/// Limits are those of WGSL's accuracy table. Operations without a rounding mode may go to either neighbour, 1 ULP;
/// sqrt is 1 / inverseSqrt: a relative 2 · 2^-23 (up to 4 ULP) and 2.5 ULP; a dot product's 4 products and 3
/// additions are each off by at most an ULP, altogether 5 ULP of the sum of magnitudes.
static OPERATIONS: &[Operation] = &[
    Operation {
        name: "x + y",
        domain: "table",
        expression: "bitcast<u32>(v.x + v.y)",
        unit: "ULP",
        limit: 1.0,
        draw: |d| [d.float(-126, 126), d.float(-126, 126), 0.0, 0.0],
        reference: |[x, y, ..]| in_ulp(x + y),
    },
    Operation {
        name: "x * y",
        domain: "table",
        expression: "bitcast<u32>(v.x * v.y)",
        unit: "ULP",
        limit: 1.0,
        draw: |d| [d.float(-63, 63), d.float(-62, 63), 0.0, 0.0],
        reference: |[x, y, ..]| in_ulp(x * y),
    },
    // As merge_attention divides: by a sum of weights.
    Operation {
        name: "x / y",
        domain: "kernels",
        expression: "bitcast<u32>(1.0 / max(v.x, 0.5))",
        unit: "ULP",
        limit: 2.5,
        draw: |d| [d.positive(-1, 31), 0.0, 0.0, 0.0],
        reference: |[x, ..]| in_ulp(1.0 / x),
    },
    Operation {
        name: "x / y",
        domain: "table",
        expression: "bitcast<u32>(v.x / v.y)",
        unit: "ULP",
        limit: 2.5,
        draw: |d| [d.float(-126, 126), d.float(-126, 125), 0.0, 0.0],
        reference: |[x, y, ..]| in_ulp(x / y),
    },
    // Squares of norms: of residuals from 1e-24, of scaled vectors to 256 · 4².
    Operation {
        name: "inverseSqrt",
        domain: "kernels",
        expression: "bitcast<u32>(inverseSqrt(v.x))",
        unit: "ULP",
        limit: 2.0,
        draw: |d| [d.positive(-80, 12), 0.0, 0.0, 0.0],
        reference: |[x, ..]| in_ulp(1.0 / x.sqrt()),
    },
    Operation {
        name: "inverseSqrt",
        domain: "table",
        expression: "bitcast<u32>(inverseSqrt(v.x))",
        unit: "ULP",
        limit: 2.0,
        draw: |d| [d.positive(-126, 127), 0.0, 0.0, 0.0],
        reference: |[x, ..]| in_ulp(1.0 / x.sqrt()),
    },
    Operation {
        name: "sqrt",
        domain: "",
        expression: "bitcast<u32>(sqrt(v.x))",
        unit: "ULP",
        limit: 6.5,
        draw: |d| [d.positive(-126, 127), 0.0, 0.0, 0.0],
        reference: |[x, ..]| in_ulp(x.sqrt()),
    },
    Operation {
        name: "exp",
        domain: "kernels",
        expression: "bitcast<u32>(exp(v.x))",
        unit: "(3 + 2|x|) ULP",
        limit: 1.0,
        draw: |d| match d.word() % 4 {
            0 => [-d.positive(-30, 5), 0.0, 0.0, 0.0],
            _ => [d.between(-100.0, 0.0), 0.0, 0.0, 0.0],
        },
        reference: |[x, ..]| exp(x),
    },
    Operation {
        name: "exp",
        domain: "table",
        expression: "bitcast<u32>(exp(v.x))",
        unit: "(3 + 2|x|) ULP",
        limit: 1.0,
        draw: |d| match d.word() % 4 {
            0 => [d.float(-30, 5), 0.0, 0.0, 0.0],
            _ => [d.between(-110.0, 88.7), 0.0, 0.0, 0.0],
        },
        reference: |[x, ..]| exp(x),
    },
    // The same in plain ULP, where a softmax has its largest weights.
    Operation {
        name: "exp",
        domain: "near 0",
        expression: "bitcast<u32>(exp(v.x))",
        unit: "ULP",
        limit: 5.0,
        draw: |d| [d.between(-1.0, 0.0), 0.0, 0.0, 0.0],
        reference: |[x, ..]| in_ulp(x.exp()),
    },
    Operation {
        name: "fma",
        domain: "",
        expression: "bitcast<u32>(fma(v.x, v.y, v.z))",
        unit: "ULP of both roundings",
        limit: 1.0,
        draw: |d| [d.float(-8, 7), d.float(-8, 7), d.float(-8, 7), 0.0],
        reference: sum_of_two_roundings,
    },
    Operation {
        name: "a * b + c",
        domain: "",
        expression: "bitcast<u32>(v.x * v.y + v.z)",
        unit: "ULP of both roundings",
        limit: 1.0,
        draw: |d| [d.float(-8, 7), d.float(-8, 7), d.float(-8, 7), 0.0],
        reference: sum_of_two_roundings,
    },
    Operation {
        name: "dot",
        domain: "kernels",
        expression: "bitcast<u32>(dot(v, v))",
        unit: "ULP of Σ|terms|",
        limit: 5.0,
        draw: |d| [(); 4].map(|()| d.float(-20, 1)),
        reference: |v| in_ulp(v.iter().map(|x| x * x).sum()),
    },
    Operation {
        name: "dot",
        domain: "table",
        expression: "bitcast<u32>(dot(v, v.yzwx))",
        unit: "ULP of Σ|terms|",
        limit: 5.0,
        draw: |d| [(); 4].map(|()| d.float(-8, 7)),
        reference: |[x, y, z, w]| {
            let terms = [x * y, y * z, z * w, w * x];
            (terms.iter().sum(), ulp(terms.iter().map(|t| t.abs()).sum()))
        },
    },
];

/// x · y is exact in f64; the sum is rounded once, to 2^-53. When both cancel, what is left is the product's error.
fn sum_of_two_roundings([x, y, z, _]: [f64; 4]) -> (f64, f64) {
    let exact = x.mul_add(y, z);
    (exact, ulp(x * y) + ulp(exact))
}

/// How the adapter rounds: whether sums, differences and products are always rounded to nearest. If so, u = 2^-24, else
/// the standard's u = 2^-23 stays.
///
/// # Errors
/// A result further off than a neighbour, or why there was none.
pub fn rounding(gpu: &Gpu) -> Result<Arithmetic, String> {
    let probes = rounding_probes(gpu);
    if let Some(broken) = probes.iter().find(|p| !p.kept) {
        return Err(format!(
            "{}: {} ({})",
            broken.name, broken.seen, broken.note
        ));
    }
    let nearest = |p: &Probe| p.seen == Seen::Text(ROUNDINGS[0].to_owned());
    Ok(if probes.iter().all(nearest) {
        Arithmetic::NEAREST
    } else {
        Arithmetic::STANDARD
    })
}

fn rounding_probes(gpu: &Gpu) -> Vec<Probe> {
    type Exact = fn(f64, f64) -> f64;
    let operations: [(&str, Exact); 3] = [
        ("+", |x, y| x + y),
        ("-", |x, y| x - y),
        ("*", |x, y| x * y),
    ];
    operations
        .into_iter()
        .map(|(symbol, exact)| {
            let probe = Probe::new(&format!("rounding of x {symbol} y"), "", "", None);
            attempt(probe, |probe| {
                let mut draw = Draw::new(&probe.name);
                // Nothing overflows or is subnormal, and f64 holds each sum and product exactly.
                let inputs = items(|| [draw.float(-8, 7), draw.float(-8, 7), 0.0, 0.0]);
                let found = evaluate(
                    gpu,
                    &format!("bitcast<u32>(v.x {symbol} v.y)"),
                    &bits(&inputs),
                )?;
                let options: Vec<_> = inputs
                    .iter()
                    .map(|[x, y, ..]| roundings(exact(f64::from(*x), f64::from(*y))))
                    .collect();
                Ok(judge::choice(probe, ROUNDINGS, &options, &found))
            })
        })
        .collect()
}

/// Every probe of a device.
pub(super) fn all(device: &Device) -> Vec<Probe> {
    let gpu = &device.gpu;
    let mut list = rounding_probes(gpu);
    list.extend(OPERATIONS.iter().map(|operation| {
        let (name, domain) = (operation.name, operation.domain);
        let probe = Probe::new(name, domain, operation.unit, Some(operation.limit));
        attempt(probe, |probe| {
            let mut draw = Draw::new(&probe.title());
            let inputs = items(|| (operation.draw)(&mut draw));
            let found = evaluate(gpu, operation.expression, &bits(&inputs))?;
            Ok(judge::accuracy(probe, &inputs, operation.reference, &found))
        })
    }));
    list.extend([
        fusing(gpu, "a * b + c", "v.x * v.y + v.z"),
        fusing(gpu, "fma", "fma(v.x, v.y, v.z)"),
    ]);
    list.extend(subnormals(gpu));
    list.extend(conversions(gpu));
    list.extend(halves(gpu));
    list.extend(storage(gpu));
    list.extend(workgroups(gpu));
    list.extend(subgroups(device));
    list
}

fn attempt(probe: Probe, run: impl FnOnce(Probe) -> Result<Probe, String>) -> Probe {
    let start = std::time::Instant::now();
    let probed = run(probe.clone()).unwrap_or_else(|why| probe.not_run(&why));
    tracing::debug!(probe = probed.title(), elapsed = ?start.elapsed(), "probed");
    probed
}

fn items<T>(draw: impl FnMut() -> T) -> Vec<T> {
    std::iter::repeat_with(draw).take(ITEMS).collect()
}

fn bits(inputs: &[[f32; 4]]) -> Vec<Words> {
    inputs.iter().map(|v| v.map(f32::to_bits)).collect()
}

/// An expression's value for each item.
fn evaluate(gpu: &Gpu, expression: &str, inputs: &[Words]) -> Result<Vec<u32>, String> {
    evaluate_in(gpu, None, expression, inputs)
}

/// The same beside a kernel's own shared text, all of its files but the last.
fn evaluate_in(
    gpu: &Gpu,
    kernel: Option<Kernel>,
    expression: &str,
    inputs: &[Words],
) -> Result<Vec<u32>, String> {
    let mut source = String::new();
    let mut constants = Vec::new();
    if let Some(kernel) = kernel {
        if let [shared @ .., _entry] = kernel.files(KernelVariant::Portable) {
            source.extend(shared.iter().map(|(_, text)| *text));
        }
        constants.extend(shaders::constants(
            kernel,
            KernelVariant::Portable,
            HeadDim::ALL[0],
            1,
        ));
    }
    source += ARITHMETIC;
    source += &format!(
        "fn answer(words: vec4<u32>) -> u32 {{ let v = bitcast<vec4<f32>>(words); return {expression}; }}"
    );
    let program = Program {
        constants: &constants,
        ..Program::new(&source, &["probe"])
    };
    let workgroups = inputs.len().div_ceil(64) as u32;
    dispatch::run(
        gpu,
        program,
        bytemuck::cast_slice(inputs),
        inputs.len(),
        [workgroups, 1],
    )
}

/// a · b − (a · b rounded): the rounding error where the operation is fused, and otherwise 0, or a unit in the last place
/// on a device that rounds the product elsewhere.
fn fusing(gpu: &Gpu, name: &str, expression: &str) -> Probe {
    let probe = Probe::new(&format!("fusing of {name}"), "", "", None);
    attempt(probe, |probe| {
        let mut draw = Draw::new(&probe.name);
        let mut options = Vec::new();
        let mut inputs = Vec::new();
        while inputs.len() < ITEMS {
            let (x, y) = (draw.float(0, 3), draw.float(0, 3));
            let exact = f64::from(x) * f64::from(y);
            let [nearest, inner, outer] = roundings(exact).map(|b| f64::from(f32::from_bits(b)));
            if exact != nearest {
                inputs.push([x, y, -nearest as f32, 0.0]);
                options.push(
                    [exact, nearest, inner, outer]
                        .map(|product| ((product - nearest) as f32).to_bits()),
                );
            }
        }
        let found = evaluate(gpu, &format!("bitcast<u32>({expression})"), &bits(&inputs))?;
        let names = [
            "fused",
            "not fused",
            "not fused, toward zero",
            "not fused, away from zero",
        ];
        Ok(judge::choice(probe, names, &options, &found))
    })
}

fn subnormals(gpu: &Gpu) -> Vec<Probe> {
    // Each result is exact, so that it is either itself or zero.
    type Case = (
        &'static str,
        &'static str,
        fn(&mut Draw) -> [f32; 2],
        fn(f64, f64) -> f64,
    );
    const CASES: [Case; 3] = [
        (
            "subnormal as input of x * y",
            "v.x * v.y",
            |d| [f32::from_bits(d.word() & 0x807f_ffff | 1), 1_073_741_824.0],
            |x, y| x * y,
        ),
        (
            "subnormal from x * y",
            "v.x * v.y",
            // Eight significant bits stay within f32's subnormals.
            |d| {
                [
                    f32::from_bits(d.float(-126, -120).to_bits() & 0xffff_0000),
                    1.0 / 1024.0,
                ]
            },
            |x, y| x * y,
        ),
        (
            "subnormal from x + y",
            "v.x + v.y",
            |d| {
                let x = d.float(-126, -126);
                [x, -f32::MIN_POSITIVE.copysign(x)]
            },
            |x, y| x + y,
        ),
    ];
    CASES
        .into_iter()
        .map(|(name, expression, draw, exact)| {
            attempt(Probe::new(name, "", "", None), |probe| {
                let mut source = Draw::new(name);
                let pairs = items(|| draw(&mut source));
                let inputs: Vec<_> = pairs.iter().map(|[x, y]| [*x, *y, 0.0, 0.0]).collect();
                let found = evaluate(gpu, &format!("bitcast<u32>({expression})"), &bits(&inputs))?;
                let options: Vec<_> = pairs
                    .iter()
                    .map(|[x, y]| [(exact(f64::from(*x), f64::from(*y)) as f32).to_bits(), 0])
                    .collect();
                Ok(judge::choice(probe, ["kept", "flushed"], &options, &found))
            })
        })
        .collect()
}

/// min and max, select, bitcasts, and conversions between integers and floats.
fn conversions(gpu: &Gpu) -> Vec<Probe> {
    let probe = |name: &str, domain| Probe::new(name, domain, "", None);
    let min_max = attempt(probe("min, max", ""), |probe| {
        let mut draw = Draw::new(&probe.name);
        let inputs = items(|| {
            let x = draw.float(-126, 127);
            let y = match draw.word() % 4 {
                0 => x,
                1 => -x,
                _ => draw.float(-126, 127),
            };
            [x, y, 0.0, 0.0]
        });
        let expression =
            "select(0u, 1u, max(v.x, v.y) == v.x) | select(0u, 2u, max(v.x, v.y) == v.y)
            | select(0u, 4u, min(v.x, v.y) == v.x) | select(0u, 8u, min(v.x, v.y) == v.y)";
        let found = evaluate(gpu, expression, &bits(&inputs))?;
        Ok(judge::exact(probe, inputs.len(), &found, |i, bits| {
            let [x, y, ..] = inputs[i];
            let right = [x >= y, y >= x, x <= y, y <= x];
            (0..4).all(|b| (bits >> b & 1 == 1) == right[b])
        }))
    });
    let zeros = attempt(probe("max, min of -0 and 0", ""), |probe| {
        let inputs = bits(&[[-0.0, 0.0, 0.0, 0.0], [0.0, -0.0, 0.0, 0.0]]);
        let mut found = evaluate(gpu, "bitcast<u32>(max(v.x, v.y))", &inputs)?;
        found.extend(evaluate(gpu, "bitcast<u32>(min(v.x, v.y))", &inputs)?);
        let signs: Vec<&str> = found
            .iter()
            .map(|bits| if bits >> 31 == 1 { "-0" } else { "0" })
            .collect();
        Ok(Probe {
            kept: found.iter().all(|bits| bits << 1 == 0),
            seen: Seen::Text(signs.join(" ")),
            ..probe
                .with_note("max(-0, 0), max(0, -0), min(-0, 0), min(0, -0): either sign is right")
        })
    });
    let select = attempt(probe("select beside NaN", ""), |probe| {
        let mut draw = Draw::new(&probe.name);
        // The arm that is not chosen is NaN or infinite.
        let inputs = items(|| {
            let value = draw.float(-126, 127).to_bits();
            let [other, chosen] = [draw.word() & 0x807f_ffff | 0x7f80_0000, draw.word() & 1];
            let arms = if chosen == 1 {
                [other, value]
            } else {
                [value, other]
            };
            [arms[0], arms[1], 0, chosen]
        });
        let found = evaluate(
            gpu,
            "bitcast<u32>(select(v.x, v.y, words.w == 1u))",
            &inputs,
        )?;
        Ok(judge::exact(probe, inputs.len(), &found, |i, bits| {
            bits == inputs[i][inputs[i][3] as usize]
        }))
    });
    let bitcast = attempt(probe("bitcast", ""), |probe| {
        let mut draw = Draw::new(&probe.name);
        let inputs = items(|| [draw.float(-126, 127).to_bits(), 0, 0, 0]);
        let found = evaluate(gpu, "bitcast<u32>(bitcast<f32>(words.x))", &inputs)?;
        Ok(judge::exact(probe, inputs.len(), &found, |i, bits| {
            bits == inputs[i][0]
        }))
    });
    let special = attempt(probe("bitcast of NaN, subnormals", "table"), |probe| {
        let inputs: Vec<Words> = special_words().into_iter().map(|w| [w, 0, 0, 0]).collect();
        let found = evaluate(gpu, "bitcast<u32>(bitcast<f32>(words.x))", &inputs)?;
        let options: Vec<_> = inputs.iter().zip(&found).map(|(i, f)| [i[0], *f]).collect();
        Ok(judge::choice(probe, ["kept", "changed"], &options, &found))
    });
    // f16_to_norm converts a significand; each is a float.
    let small = attempt(probe("u32 to f32", "kernels"), |probe| {
        let inputs: Vec<Words> = (0..1024).map(|n| [n, 0, 0, 0]).collect();
        let found = evaluate(gpu, "bitcast<u32>(f32(words.x))", &inputs)?;
        Ok(judge::exact(probe, 1024, &found, |i, bits| {
            bits == (i as f32).to_bits()
        }))
    });
    let wide = attempt(probe("u32 to f32", "table"), |probe| {
        let mut draw = Draw::new(&probe.name);
        let inputs = items(|| [draw.word() >> (draw.word() & 7), 0, 0, 0]);
        let found = evaluate(gpu, "bitcast<u32>(f32(words.x))", &inputs)?;
        let options: Vec<_> = inputs.iter().map(|i| roundings(f64::from(i[0]))).collect();
        Ok(judge::choice(probe, ROUNDINGS, &options, &found))
    });
    let back = attempt(probe("f32 to u32", "table"), |probe| {
        let mut draw = Draw::new(&probe.name);
        let inputs = items(|| [draw.positive(-4, 31), 0.0, 0.0, 0.0]);
        let found = evaluate(gpu, "u32(v.x)", &bits(&inputs))?;
        Ok(judge::exact(probe, inputs.len(), &found, |i, n| {
            n == inputs[i][0] as u32
        }))
    });
    vec![min_max, zeros, select, bitcast, special, small, wide, back]
}

/// f16 conversions: those of the kernels, in the kernels' own text, and WGSL's.
fn halves(gpu: &Gpu) -> Vec<Probe> {
    let probe = |name: &str, domain| Probe::new(name, domain, "", None);
    let finite = || (0..0x7c00_u16).map(f16::from_bits);
    let encode = attempt(probe("norm_to_f16", ""), |probe| {
        // Each f16, the midpoint above it, and the neighbours of both; then norms that saturate.
        let mut inputs: Vec<f32> = finite()
            .flat_map(|h| {
                let above = match h.to_bits() {
                    0x7bff => 65_536.0,
                    bits => f16::from_bits(bits + 1).to_f32(),
                };
                [h.to_f32(), (h.to_f32() + above) / 2.0]
            })
            .flat_map(|x| [x.next_down().max(0.0), x, x.next_up()])
            .collect();
        inputs.extend([1e-30, 1e-12, 65_536.0, 70_000.0, 1e10, f32::MAX]);
        let words: Vec<Words> = inputs.iter().map(|x| [x.to_bits(), 0, 0, 0]).collect();
        let found = evaluate_in(gpu, Some(Kernel::EncodeKeys), "norm_to_f16(v.x)", &words)?;
        Ok(judge::exact(probe, inputs.len(), &found, |i, bits| {
            bits == u32::from(f16::from_f32(inputs[i]).to_bits().min(0x7bff))
        }))
    });
    let decode = attempt(probe("f16_to_norm", ""), |probe| {
        let words: Vec<Words> = (0..0x7c00).map(|h| [h, 0, 0, 0]).collect();
        let expression = "bitcast<u32>(f16_to_norm(words.x))";
        let found = evaluate_in(gpu, Some(Kernel::EncodeKeys), expression, &words)?;
        let right: Vec<u32> = finite().map(|h| h.to_f32().to_bits()).collect();
        Ok(judge::exact(probe, right.len(), &found, |i, bits| {
            bits == right[i]
        }))
    });
    let weight = attempt(probe("weight", ""), |probe| {
        // 1 at 0 of either sign, 0 far below.
        let mut draw = Draw::new(&probe.name);
        let inputs = items(|| match draw.word() % 4 {
            0 => [0.0_f32.copysign(draw.float(0, 0)), 0.0, 0.0, 0.0],
            _ => [
                -100.0_f32.next_up() - draw.positive(-10, 120),
                0.0,
                0.0,
                0.0,
            ],
        });
        let expression = "bitcast<u32>(weight(v.x))";
        let found = evaluate_in(
            gpu,
            Some(Kernel::MergeAttention),
            expression,
            &bits(&inputs),
        )?;
        Ok(judge::exact(probe, inputs.len(), &found, |i, bits| {
            let at_zero = inputs[i][0] == 0.0;
            let right = if at_zero { 1.0 } else { 0.0 };
            // Rounding may leave an input at -100 itself, where exp is subnormal.
            inputs[i][0] == -100.0 || f32::from_bits(bits) == right
        }))
    });
    let unpack = attempt(probe("unpack2x16float", ""), |probe| {
        let all: Vec<f16> = (0..=u16::MAX)
            .map(f16::from_bits)
            .filter(|h| h.is_finite())
            .collect();
        // The half that is not asked for holds something else.
        let words: Vec<Words> = all
            .iter()
            .flat_map(|h| {
                let h = u32::from(h.to_bits());
                [[h | 0x3555_0000, 0, 0, 0], [h << 16 | 0x3555, 0, 0, 1]]
            })
            .collect();
        let expression = "bitcast<u32>(select(unpack2x16float(words.x).x, unpack2x16float(words.x).y, words.w == 1u))";
        let found = evaluate(gpu, expression, &words)?;
        let options: Vec<[u32; 2]> = all
            .iter()
            .flat_map(|h| {
                let bits = h.to_f32().to_bits();
                let tiny = h.to_bits() & 0x7c00 == 0;
                [[bits, if tiny { 0 } else { bits }]; 2]
            })
            .collect();
        let names = ["subnormals kept", "subnormals flushed"];
        Ok(judge::choice(probe, names, &options, &found))
    });
    let pack = attempt(probe("rounding of pack2x16float", ""), |probe| {
        let mut draw = Draw::new(&probe.name);
        let inputs = items(|| [draw.float(-14, 14), draw.float(-14, 14), 0.0, 0.0]);
        let found = evaluate(gpu, "pack2x16float(v.xy) & 0xffffu", &bits(&inputs))?;
        let options: Vec<_> = inputs.iter().map(|[x, ..]| half_roundings(*x)).collect();
        Ok(judge::choice(probe, ROUNDINGS, &options, &found))
    });
    let beyond = attempt(probe("pack2x16float at the end of f16", ""), |probe| {
        let values = [65_504.0, 65_519.0, 65_520.0, 70_000.0, 1e10, f32::INFINITY];
        let inputs = values.map(|x| [x, 1.0, 0.0, 0.0]);
        let found = evaluate(gpu, "pack2x16float(v.xy)", &bits(&inputs))?;
        let seen: Vec<String> = found.iter().map(|bits| format!("{bits:08x}")).collect();
        Ok(Probe {
            kept: found.first() == Some(&0x3c00_7bff),
            seen: Seen::Text(seen.join(" ")),
            ..probe.with_note("(x, 1) for x = 65504, 65519, 65520, 70000, 1e10, inf: beyond 65504 any value is right")
        })
    });
    vec![encode, decode, weight, unpack, pack, beyond]
}

/// As [`roundings`], to f16's normal range.
fn half_roundings(x: f32) -> [u32; 3] {
    let nearest = f16::from_f32(x).to_bits();
    let (inner, outer) = match f16::from_bits(nearest).to_f32().abs().total_cmp(&x.abs()) {
        std::cmp::Ordering::Equal => (nearest, nearest),
        std::cmp::Ordering::Less => (nearest, nearest + 1),
        std::cmp::Ordering::Greater => (nearest - 1, nearest),
    };
    [nearest, inner, outer].map(u32::from)
}

/// NaNs of either kind and sign with payloads, infinities, subnormals and zeros.
fn special_words() -> Vec<u32> {
    let mut draw = Draw::new("special words");
    let mut words = vec![
        0,
        1 << 31,
        0x7f80_0000,
        0xff80_0000,
        0x7fc0_0000,
        1,
        0x807f_ffff,
    ];
    words.extend((0..4096).map(|i| {
        let exponent = if i % 2 == 0 { 0x7f80_0000 } else { 0 };
        draw.word() & 0x807f_ffff | 1 | exponent
    }));
    words
}

fn storage(gpu: &Gpu) -> Vec<Probe> {
    let words = special_words();
    let copy = |entry: &'static str, words: &[u32]| {
        let workgroups = words.len().div_ceil(64) as u32;
        let entries = [entry];
        let program = Program::new(MEMORY, &entries);
        dispatch::run(gpu, program, words, words.len(), [workgroups, 1])
    };
    let through = |name: &str| Probe::new(name, "", "", None);
    let as_u32 = attempt(through("u32 through storage"), |probe| {
        let found = copy("copy_words", &words)?;
        Ok(judge::exact(probe, words.len(), &found, |i, bits| {
            bits == words[i]
        }))
    });
    // As f32, WGSL lets everything here change but zeros: subnormals become 0, NaNs and infinities anything.
    let as_f32 = |name: &str, of: fn(f32) -> bool, names: [&str; 3], other: fn(u32) -> u32| {
        attempt(through(name), |probe| {
            let words: Vec<u32> = words
                .iter()
                .copied()
                .filter(|w| of(f32::from_bits(*w)))
                .collect();
            let found = copy("copy_floats", &words)?;
            let options: Vec<_> = words
                .iter()
                .zip(&found)
                .map(|(w, f)| {
                    [
                        *w,
                        other(*w),
                        if f32::from_bits(*w).is_finite() {
                            *w
                        } else {
                            *f
                        },
                    ]
                })
                .collect();
            Ok(judge::choice(probe, names, &options, &found))
        })
    };
    vec![
        as_u32,
        as_f32(
            "subnormal through f32 storage",
            f32::is_subnormal,
            ["kept", "flushed", "kept"],
            |_| 0,
        ),
        as_f32(
            "NaN through f32 storage",
            f32::is_nan,
            ["kept", "made quiet", "changed"],
            |w| w | 0x40_0000,
        ),
        as_f32(
            "infinity through f32 storage",
            f32::is_infinite,
            ["kept", "kept", "changed"],
            |w| w,
        ),
    ]
}

fn workgroups(gpu: &Gpu) -> Vec<Probe> {
    // Words of workgroup memory. Few if zeroed: lavapipe takes minutes to compile the zeroing of 2048.
    let shared = |zero| if zero { 256 } else { 2048 };
    let look = |zero| {
        let shared: usize = shared(zero);
        let program = Program {
            zero_workgroup_memory: zero,
            constants: &[("SHARED", shared as f64)],
            ..Program::new(MEMORY, &["leave_rubbish", "look"])
        };
        let workgroups = [SHARERS as u32, 1];
        dispatch::run(gpu, program, &[0x5a5a_5a5a], shared * SHARERS, workgroups)
    };
    let probe = |name: &str| Probe::new(name, "", "", None);
    let zeroed = attempt(probe("workgroup memory, zeroed"), |probe| {
        let found = look(true)?;
        Ok(judge::exact(
            probe,
            shared(true) * SHARERS,
            &found,
            |_, word| word == 0,
        ))
    });
    let left = attempt(probe("workgroup memory, not zeroed"), |probe| {
        let found = look(false)?;
        let stale = found.iter().filter(|word| **word != 0).count();
        let unwritten = found.contains(&dispatch::UNWRITTEN);
        Ok(Probe {
            kept: !unwritten,
            seen: Seen::Text(match stale {
                0 => "zeros".to_owned(),
                _ => "rubbish".to_owned(),
            }),
            ..probe.with_note(&format!("{stale} of {} words are not 0", found.len()))
        })
    });
    let ring = attempt(probe("barriers in functions in loops"), |probe| {
        let program = Program::new(MEMORY, &["ring_in_functions"]);
        let found = dispatch::run(gpu, program, &[0], 64, [1, 1])?;
        Ok(judge::exact(probe, 64, &found, |lane, word| {
            word == 2016 * 64 + lane as u32
        }))
    });
    let spill = attempt(probe("workgroups beyond x"), |probe| {
        let columns = gpu
            .device()
            .limits()
            .max_compute_workgroups_per_dimension
            .min(65_535);
        let n = 2 * columns as usize;
        let program = Program::new(MEMORY, &["spill"]);
        let found = dispatch::run(gpu, program, &[0x55], n, [columns, 2])?;
        Ok(judge::exact(probe, n, &found, |i, word| {
            word == i as u32 ^ 0x55
        }))
    });
    vec![zeroed, left, ring, spill]
}

fn subgroups(device: &Device) -> Option<Probe> {
    // The device was opened with them if the adapter has them.
    let gpu = &device.gpu;
    if !gpu.device().features().contains(wgpu::Features::SUBGROUP) {
        return None;
    }
    let probe = Probe::new("subgroup operations", "", "", None);
    Some(attempt(probe, |probe| {
        let program = Program::new(SUBGROUP, &["subgroups"]);
        let found = dispatch::run(gpu, program, &[1], 64 * judge::SUBGROUP_WORDS, [1, 1])?;
        Ok(judge::subgroups(probe, device.subgroup_sizes(), &found))
    }))
}
