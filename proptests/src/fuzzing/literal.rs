//! A second decoder, written from the format's description alone.
//!
//! Slow and literal on purpose: it shares no line with the library's, computes in 128 bits, and
//! copies element after element out of the bytes.

/// Everything that a blob says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Contents {
    pub n_kv_heads: u32,
    pub head_dim: u32,
    pub seq_len: u32,
    /// 0 to 3 for each element of each vector, head after head.
    pub codes: Vec<u8>,
    /// Sign bit of each element of each key.
    pub signs: Vec<bool>,
    /// f16 bits of each vector's norm.
    pub norms: Vec<u16>,
    /// f16 bits of the norm of each key's residual.
    pub residual_norms: Vec<u16>,
}

/// What is wrong with bytes that are no blob.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    Header,
    Magic,
    HeadDim,
    NoHeads,
    Length,
    Norm { residual: bool, record: usize },
}

/// Reads a blob of keys, or one of values.
pub(super) fn decode(keys: bool, bytes: &[u8]) -> Result<Contents, Fault> {
    if bytes.len() < 16 {
        return Err(Fault::Header);
    }
    let magic = [b'T', b'Q', if keys { b'K' } else { b'V' }, b'1'];
    for i in 0..4 {
        if bytes[i] != magic[i] {
            return Err(Fault::Magic);
        }
    }
    let u32_at = |at: usize| {
        let mut n = 0;
        for i in 0..4 {
            n += u32::from(bytes[at + i]) * 256_u32.pow(i as u32);
        }
        n
    };
    let (n_kv_heads, head_dim, seq_len) = (u32_at(4), u32_at(8), u32_at(12));
    if head_dim == 0 || head_dim % if keys { 8 } else { 4 } != 0 {
        return Err(Fault::HeadDim);
    }
    if n_kv_heads == 0 && seq_len != 0 {
        return Err(Fault::NoHeads);
    }
    let vectors = u128::from(n_kv_heads) * u128::from(seq_len);
    let d = u128::from(head_dim);
    let code_bytes = vectors * d / 4;
    let sign_bytes = if keys { vectors * d / 8 } else { 0 };
    let norm_bytes = vectors * 2;
    let residual_bytes = if keys { vectors * 2 } else { 0 };
    if bytes.len() as u128 != 16 + code_bytes + sign_bytes + norm_bytes + residual_bytes {
        return Err(Fault::Length);
    }

    let mut next = 16;
    let mut take = |count: u128| {
        let start = next;
        next += count as usize;
        &bytes[start..next]
    };
    let mut codes = Vec::new();
    for byte in take(code_bytes) {
        for bit in [0, 2, 4, 6] {
            codes.push(byte / (1 << bit) % 4);
        }
    }
    let mut signs = Vec::new();
    for byte in take(sign_bytes) {
        for bit in 0..8 {
            signs.push(byte / (1 << bit) % 2 == 1);
        }
    }
    let mut halves = |count: u128, residual: bool| {
        let mut norms = Vec::new();
        for (record, pair) in take(count).chunks(2).enumerate() {
            let bits = u16::from(pair[0]) + 256 * u16::from(pair[1]);
            let (sign, exponent) = (bits / 0x8000, bits % 0x8000 / 0x400);
            if sign == 1 || exponent == 31 {
                return Err(Fault::Norm { residual, record });
            }
            norms.push(bits);
        }
        Ok(norms)
    };
    let norms = halves(norm_bytes, false)?;
    let residual_norms = halves(residual_bytes, true)?;
    Ok(Contents {
        n_kv_heads,
        head_dim,
        seq_len,
        codes,
        signs,
        norms,
        residual_norms,
    })
}
