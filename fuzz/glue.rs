//! Glue between libFuzzer and the bodies in `tqcheck::fuzzing`.

#[doc(hidden)]
pub use libfuzzer_sys;

/// Defines a fuzz target by a [`tqcheck::fuzzing::Target`].
///
/// A mutation is libFuzzer's own, then repaired by the target.
#[macro_export]
macro_rules! target {
    ($target:expr) => {
        $crate::libfuzzer_sys::fuzz_target!(|data: &[u8]| {
            ($target.run)(data);
        });

        $crate::libfuzzer_sys::fuzz_mutator!(|data: &mut [u8],
                                              size: usize,
                                              max_size: usize,
                                              seed: u32| {
            let size = $crate::libfuzzer_sys::fuzzer_mutate(data, size, max_size);
            ($target.shape)(&mut data[..max_size], size, seed)
        });
    };
}
