//! `case_toml`: the parser of saved cases.

use super::{Fate, says_something};
use crate::case::Case;

pub(super) fn run(bytes: &[u8]) -> Fate {
    let Ok(text) = core::str::from_utf8(bytes) else {
        return Fate::Refused;
    };
    match Case::from_toml(text) {
        Ok(case) => {
            // Compared as text, since a scale may be NaN.
            let saved = case.to_toml();
            let again = Case::from_toml(&saved).expect("what was saved parses");
            assert_eq!(again.to_toml(), saved);
            assert!(case.rotation().is_ok() && case.shape().is_ok());
            Fate::Accepted
        }
        Err(error) => {
            assert!(says_something(&error));
            Fate::Refused
        }
    }
}
