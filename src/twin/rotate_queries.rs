//! Twin of `shaders/rotate_queries.wgsl`.

use super::{Scaled, power_of_two};
use crate::Rotation;
use crate::rotation::rht;

/// One query vector in the two bases that a score needs.
#[derive(Clone, Debug, PartialEq)]
pub struct RotatedQuery {
    /// RHT(q; polar), which meets the codes.
    pub polar: Vec<f32>,
    /// RHT(RHT(q; polar); jl), which meets the residual signs.
    pub jl: Vec<f32>,
}

/// Rotates one query vector of `head_dim` elements.
///
/// A query with a NaN or an infinity in it becomes the zero query, which attends to everything alike;
/// the second value says so.
#[must_use]
pub fn rotate_queries(rotation: &Rotation, q: &[f32]) -> (RotatedQuery, bool) {
    let head_dim = rotation.head_dim();
    let Some(scaled) = Scaled::new(q) else {
        let zero = vec![0.0; head_dim.get()];
        return (
            RotatedQuery {
                polar: zero.clone(),
                jl: zero,
            },
            true,
        );
    };
    // Scaled by an exact power of two, the sums cannot overflow before the factor 1/√d.
    let unscale = power_of_two(-scaled.shift);
    let mut polar = scaled.elements;
    rht(head_dim, &rotation.polar, &mut polar);
    let mut jl = polar.clone();
    rht(head_dim, &rotation.jl, &mut jl);
    for v in polar.iter_mut().chain(&mut jl) {
        *v *= unscale;
    }
    (RotatedQuery { polar, jl }, false)
}
