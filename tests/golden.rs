//! The CPU twin against the format's origin: bytes and outputs of cera 0.5.5 in `testdata/golden`.

use std::fs;
use std::path::Path;

use turboquant_wgpu::blob::{decode, decode_kind};
use turboquant_wgpu::layout::Kind;
use turboquant_wgpu::twin::{self, AttentionShape};
use turboquant_wgpu::{Gain, HeadDim, Rotation};

fn floats(path: &Path) -> Vec<f32> {
    fs::read(path)
        .unwrap_or_else(|e| panic!("{}: {e}", path.display()))
        .chunks_exact(4)
        .map(|b| f32::from_le_bytes(b.try_into().expect("four bytes")))
        .collect()
}

fn golden() -> Vec<(std::path::PathBuf, toml::Table)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata/golden");
    let mut cases: Vec<_> = fs::read_dir(&root)
        .expect("testdata/golden is part of the repository")
        .map(|entry| entry.expect("a directory entry").path())
        .filter(|path| path.is_dir())
        .map(|path| {
            let text = fs::read_to_string(path.join("case.toml")).expect("case.toml");
            (path, text.parse().expect("case.toml parses"))
        })
        .collect();
    cases.sort_by(|a, b| a.0.cmp(&b.0));
    assert_eq!(cases.len(), 11, "every golden case is there");
    cases
}

fn number(case: &toml::Table, key: &str) -> u64 {
    case[key].as_integer().expect("a number") as u64
}

#[test]
fn the_twins_bytes_and_attention_are_the_origins() {
    for (path, case) in golden() {
        let head_dim = HeadDim::try_from(number(&case, "head_dim") as u32).expect("supported");
        let n_kv_heads = number(&case, "n_kv_heads") as u32;
        let rotation = Rotation::from_rotation_seed(head_dim, number(&case, "rotation_seed"));
        assert_eq!(
            number(&case, "seed") ^ number(&case, "layer"),
            number(&case, "rotation_seed")
        );
        let (k, v) = (floats(&path.join("k.f32")), floats(&path.join("v.f32")));
        let (snapshot, ..) = twin::snapshot(&rotation, n_kv_heads, &k, &v).expect("it encodes");
        let keys = fs::read(path.join("keys.tqk1")).expect("keys.tqk1");
        let values = fs::read(path.join("values.tqv1")).expect("values.tqv1");
        assert_eq!(snapshot.keys, keys, "{}: keys", path.display());
        assert_eq!(snapshot.values, values, "{}: values", path.display());

        if case["attention"].as_bool() == Some(true) {
            let keys = decode_kind(Kind::Keys, &keys).expect("keys decode");
            let values = decode(&values).expect("values decode");
            let q = floats(&path.join("q.f32"));
            let n_heads = number(&case, "n_heads") as u32;
            let shape = AttentionShape {
                rows: number(&case, "seq_len") as u32,
                n_heads,
                start_pos: 0,
                scale: head_dim.inv_sqrt(),
                gain: Gain::Cera,
            };
            let out = twin::attention(&rotation, &keys, &values, &q, &shape).expect("it attends");
            let expected = floats(&path.join("attention.f32"));
            assert_eq!(out.len(), expected.len());
            // A coarse look: the harness judges these outputs with derived bounds.
            let largest = expected.iter().fold(0.0_f32, |m, v| m.max(v.abs()));
            for (a, b) in out.iter().zip(&expected) {
                approx::assert_abs_diff_eq!(a, b, epsilon = 1e-4 * largest);
            }
        }
    }
}

#[derive(serde::Deserialize)]
struct Constants {
    d32: Table,
    d64: Table,
    d128: Table,
    d256: Table,
    signs: Vec<SignExample>,
}

#[derive(serde::Deserialize)]
struct Table {
    centroid_bits: [u32; 4],
    boundary_bits: [u32; 3],
    qjl_scale_bits: u32,
}

#[derive(serde::Deserialize)]
struct SignExample {
    rotation_seed: u64,
    head_dim: u32,
    polar: String,
    jl: String,
}

#[test]
fn the_constants_are_the_origins() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata/golden");
    let text = fs::read_to_string(root.join("constants.toml")).expect("constants.toml");
    let constants: Constants = toml::from_str(&text).expect("constants.toml parses");
    let tables = [constants.d32, constants.d64, constants.d128, constants.d256];
    for (head_dim, table) in HeadDim::ALL.into_iter().zip(tables) {
        let book = head_dim.codebook();
        assert_eq!(book.centroids.map(f32::to_bits), table.centroid_bits);
        assert_eq!(book.boundaries[0].to_bits(), table.boundary_bits[0]);
        assert_eq!(book.boundaries[2].to_bits(), table.boundary_bits[2]);
        // The origin's middle boundary is rounding noise around the exact 0.
        assert!(f32::from_bits(table.boundary_bits[1]).abs() < 1e-15);
        assert_eq!(Gain::Cera.factor(head_dim).to_bits(), table.qjl_scale_bits);
    }
    assert_eq!(constants.signs.len(), 4);
    for example in constants.signs {
        let head_dim = HeadDim::try_from(example.head_dim).expect("supported");
        let rotation = Rotation::from_rotation_seed(head_dim, example.rotation_seed);
        for (expected, signs) in [(example.polar, rotation.polar), (example.jl, rotation.jl)] {
            let text: String = (0..head_dim.get())
                .map(|i| if signs.is_positive(i) { '+' } else { '-' })
                .collect();
            assert_eq!(text, expected, "seed {}", example.rotation_seed);
        }
    }
}
