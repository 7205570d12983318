//! `law_repeat`: the same dispatches give the same bits.

use super::{same_floats, same_raw};
use crate::adapters::Device;
use crate::case::Case;
use crate::fixture::{Attended, Fixture, Raw};
use crate::verdict::{Evidence, Failure, Outcome};

/// Encoding and attending once more gives the same bits, after a dispatch that left rubbish in workgroup
/// memory, and with workgroup memory cleared.
pub fn check(device: &Device, case: &Case) -> Outcome {
    let (raw, attended) = run(device, case, false)?;
    let mut evidence = Evidence::default();
    for (what, device, litter) in [
        ("once more", device, false),
        ("after rubbish", device, true),
        ("with memory cleared", device.zeroing(), true),
    ] {
        let rule = "the same dispatches give the same bits";
        let (raw_again, again) = run(device, case, litter)?;
        same_raw(rule, what, &mut evidence, &raw_again, &raw)?;
        same_floats(rule, what, &mut evidence, &again.rotated, &attended.rotated)?;
        same_floats(rule, what, &mut evidence, &again.out, &attended.out)?;
    }
    Ok(evidence)
}

fn run(device: &Device, case: &Case, litter: bool) -> Result<(Raw, Attended), Failure> {
    let encoder = || {
        let mut encoder = device.encoder();
        if litter {
            device.litter(&mut encoder);
        }
        encoder
    };
    let mut fixture = Fixture::empty(device, case)?;
    let mut first = encoder();
    fixture.encode_rows(&mut first, case.encode_split)?;
    let raw = fixture.read_raw(first)?;
    let attended = fixture.attend(encoder(), &case.queries()?)?;
    Ok((raw, attended))
}
