//! `cargo xtask test`: what CI runs, in its order.

use crate::drivers::{self, Wanted};
use crate::runner::{self, Runner, Step};

/// The steps that run on every machine, in order. Installing drivers comes
/// between `adapters` and `test`, where it is needed.
const PLANNED: [&str; 6] = ["fmt", "clippy", "doc", "build", "adapters", "test"];

/// Returns the exit code to pass on. `require` names the backends without
/// whose adapters the tests must fail.
pub fn run(runner: &mut Runner, require: &str, install: bool) -> anyhow::Result<u8> {
    let result = steps(runner, require, install);
    eprint!("\n{}", runner::table(runner.records(), &PLANNED));
    result.map(|()| 0)
}

fn steps(runner: &mut Runner, require: &str, install: bool) -> anyhow::Result<()> {
    for step in before_adapters() {
        runner.require(&step)?;
    }
    let wanted = Wanted {
        release: false,
        backends: Some(require),
    };
    drivers::ensure(runner, &wanted, install)?;
    runner.require(&test_step(require))
}

/// What needs no adapter comes first, the cheapest at the front.
fn before_adapters() -> [Step; 4] {
    [
        Step::cargo("fmt").args(["fmt", "--all", "--check"]),
        Step::cargo("clippy")
            .args(["clippy", "--workspace", "--all-targets"])
            .args(["--", "-D", "warnings"]),
        Step::cargo("doc")
            .args(["doc", "--workspace", "--no-deps"])
            .env("RUSTDOCFLAGS", "-D warnings"),
        // A step of its own, so that the next one's time is not the compiler's.
        Step::cargo("build").args(["build", "--package", "tqcheck"]),
    ]
}

fn test_step(require: &str) -> Step {
    Step::cargo("test")
        .args(["test", "--workspace"])
        // A test that finds no adapter has shown nothing: it must not pass.
        .env("TQCHECK_REQUIRE", require)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_steps_are_those_of_the_plan() {
        let mut names: Vec<String> = before_adapters()
            .iter()
            .map(|step| step.name().to_owned())
            .collect();
        names.push("adapters".to_owned());
        names.push(test_step("vulkan").name().to_owned());
        assert_eq!(names, PLANNED);
    }

    #[test]
    fn warnings_are_errors_and_adapters_are_required() {
        let [fmt, clippy, doc, _] = before_adapters().map(|step| step.command_line());
        assert_eq!(fmt, "cargo fmt --all --check");
        assert_eq!(
            clippy,
            "cargo clippy --workspace --all-targets -- -D warnings"
        );
        assert_eq!(
            doc,
            "RUSTDOCFLAGS='-D warnings' cargo doc --workspace --no-deps"
        );
        assert_eq!(
            test_step("vulkan,gl").command_line(),
            "TQCHECK_REQUIRE=vulkan,gl cargo test --workspace"
        );
    }
}
