//! The subcommands of `tqcheck`.

pub mod adapters;
pub mod bench;
pub mod golden;
pub mod inspect;
pub mod replay;
pub mod run;
pub mod trace;

use std::process::ExitCode;
use std::time::Duration;

use turboquant_wgpu::KernelVariant;

/// How a command ended, and the exit code that says so.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// Everything that was asked holds: 0.
    Holds,
    /// Something is violated: 1.
    Violation,
    /// The call made no sense: 2, as clap's own.
    Usage,
    /// No adapter that was asked for: 3.
    NoAdapter,
    /// Stopped by the user before everything was checked: 130, as shells have it.
    Interrupted,
}

impl From<End> for ExitCode {
    fn from(end: End) -> Self {
        Self::from(match end {
            End::Holds => 0,
            End::Violation => 1,
            End::Usage => 2,
            End::NoAdapter => 3,
            End::Interrupted => 130,
        })
    }
}

/// The git revision that this program was built from, if it was built from a repository.
#[must_use]
pub fn git_revision() -> Option<String> {
    let revision = git_version::git_version!(args = ["--always", "--dirty"], fallback = "");
    (!revision.is_empty()).then(|| revision.to_owned())
}

/// Parses a number of minutes, which may be a fraction.
///
/// # Errors
/// What is no number above zero.
pub fn minutes(text: &str) -> Result<Duration, String> {
    let minutes: f64 = text.parse().map_err(|e| format!("{e}"))?;
    if !(minutes > 0.0 && minutes < 1e6) {
        return Err("expected a number of minutes above 0".to_owned());
    }
    Ok(Duration::from_secs_f64(60.0 * minutes))
}

/// A table in the plain style of the terminal.
pub(crate) fn table<const N: usize>(header: [&str; N]) -> comfy_table::Table {
    let mut table = comfy_table::Table::new();
    table
        .load_style(comfy_table::presets::NOTHING)
        .set_header(header);
    table
}

/// The variant of this name.
fn variant(name: &str) -> anyhow::Result<KernelVariant> {
    KernelVariant::by_name(name).ok_or_else(|| {
        let names = KernelVariant::ALL.map(KernelVariant::name).join(", ");
        anyhow::anyhow!("no variant \"{name}\"; there are: {names}")
    })
}
