//! Grouped-query attention: which KV head a query head reads.

use crate::Error;

/// Query heads that share one KV head: query head h reads KV head h / (this number).
///
/// # Errors
/// [`Error::HeadsDoNotDivide`]; [`Error::ZeroSize`] if there are no heads.
pub fn query_heads_per_kv_head(n_heads: u32, n_kv_heads: u32) -> Result<u32, Error> {
    for (what, n) in [("n_heads", n_heads), ("n_kv_heads", n_kv_heads)] {
        if n == 0 {
            return Err(Error::ZeroSize { what });
        }
    }
    if n_heads.is_multiple_of(n_kv_heads) {
        Ok(n_heads / n_kv_heads)
    } else {
        Err(Error::HeadsDoNotDivide {
            n_heads,
            n_kv_heads,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_that_do_not_divide_are_refused() {
        assert_eq!(query_heads_per_kv_head(9, 3), Ok(3));
        assert_eq!(query_heads_per_kv_head(7, 7), Ok(1));
        assert!(matches!(
            query_heads_per_kv_head(6, 4),
            Err(Error::HeadsDoNotDivide {
                n_heads: 6,
                n_kv_heads: 4
            })
        ));
        assert!(matches!(
            query_heads_per_kv_head(2, 3),
            Err(Error::HeadsDoNotDivide { .. })
        ));
        assert!(query_heads_per_kv_head(0, 4).is_err());
        assert!(query_heads_per_kv_head(4, 0).is_err());
    }
}
