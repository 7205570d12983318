//! `tqcheck golden`.
use super::End;
/// placeholder
#[derive(clap::Args)]
pub struct Args {}
/// Runs the command.
pub fn run(_: &Args) -> anyhow::Result<End> {
    Ok(End::Usage)
}
