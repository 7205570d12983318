//! What can go wrong in a measurement.

/// Why something could not be measured.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The library refused or failed.
    #[error(transparent)]
    Library(#[from] turboquant_wgpu::Error),
    /// wgpu refused what a baseline asked for.
    #[error("wgpu refused {what}: {message}")]
    Refused {
        /// What was attempted.
        what: String,
        /// wgpu's message.
        message: String,
    },
    /// The time stamps could not be read.
    #[error("the time stamps could not be read: {0}")]
    Stamps(String),
    /// A shape's name is not one.
    #[error("\"{found}\" is no shape: {problem}; expected a name like 32x8-d128-s32768")]
    Shape {
        /// The name.
        found: String,
        /// What is wrong with it.
        problem: String,
    },
    /// A drawing could not be made.
    #[error("the drawing could not be made: {0}")]
    Drawing(String),
    /// The implementation cannot do this job.
    #[error("{0}")]
    Unsupported(String),
}
