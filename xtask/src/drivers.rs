//! Sees to it that an adapter answers: asks `tqcheck`, and installs Mesa's
//! software Vulkan and GL where it says that none does.

use std::ffi::OsStr;
use std::time::Duration;

use anyhow::{Context, bail};

use crate::runner::{Outcome, Runner, Step, StepError};

/// What `tqcheck` exits with when no usable adapter answers.
const NO_ADAPTER: i32 = 3;

/// What wgpu's Vulkan and GL backends need in order to run in software.
/// The names are the same in Debian 12 and 13 and in Ubuntu 24.04.
pub const PACKAGES: [&str; 5] = [
    // The Vulkan loader, which wgpu opens as libvulkan.so.1.
    "libvulkan1",
    // lavapipe, and its manifest in /usr/share/vulkan/icd.d.
    "mesa-vulkan-drivers",
    // The EGL dispatcher, which wgpu opens as libEGL.so.1.
    "libegl1",
    // Mesa's EGL behind that dispatcher. It offers the surfaceless platform:
    // no display server is needed.
    "libegl-mesa0",
    // llvmpipe, the driver behind that EGL. Nothing above depends on it in
    // Debian 12.
    "libgl1-mesa-dri",
];

/// Variables that can hide an installed driver from wgpu.
const STEERING: [&str; 7] = [
    "VK_DRIVER_FILES",
    "VK_ICD_FILENAMES",
    "VK_LOADER_DRIVERS_DISABLE",
    "__EGL_VENDOR_LIBRARY_FILENAMES",
    "LIBGL_DRIVERS_PATH",
    "WGPU_BACKEND",
    "WGPU_ADAPTER_NAME",
];

/// The step that runs `tqcheck` with `args`, built if it has to be.
pub fn tqcheck<'a>(
    name: impl Into<String>,
    release: bool,
    args: impl IntoIterator<Item = &'a str>,
) -> Step {
    // Through cargo, for it alone knows the directory that a configuration
    // file, a variable or a default target makes it put the program in.
    let mut step = Step::cargo(name).args(["run", "--quiet"]);
    if release {
        step = step.arg("--release");
    }
    step.args(["--package", "tqcheck", "--bin", "tqcheck", "--"])
        .args(args)
}

/// What may be done about a missing adapter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Means {
    /// apt-get can be called as it is.
    Root,
    /// apt-get can be called through sudo, which asks no password.
    Sudo,
    /// Nothing may be installed, and this is why.
    None(&'static str),
}

/// What [`Means`] depends on.
#[derive(Clone, Copy, Debug)]
struct Facts {
    allowed: bool,
    apt_get: bool,
    root: bool,
    sudo: bool,
    sudo_without_password: bool,
}

fn means(facts: Facts) -> Means {
    match facts {
        Facts { allowed: false, .. } => Means::None("--no-install was given"),
        Facts { apt_get: false, .. } => {
            Means::None("apt-get, expected on Debian and Ubuntu, is not on PATH")
        }
        Facts { root: true, .. } => Means::Root,
        Facts { sudo: false, .. } => {
            Means::None("apt-get needs root, and neither is this root nor is sudo on PATH")
        }
        Facts {
            sudo_without_password: false,
            ..
        } => Means::None("sudo asks for a password; run `sudo -v` in this terminal and try again"),
        _ => Means::Sudo,
    }
}

/// Finds out what may be done here; `allowed` is the user's word on it.
pub fn means_here(runner: &Runner, allowed: bool) -> anyhow::Result<Means> {
    let mut facts = Facts {
        allowed,
        apt_get: on_path("apt-get"),
        root: false,
        sudo: on_path("sudo"),
        sudo_without_password: false,
    };
    if allowed && facts.apt_get {
        let (_, user) = runner.capture(&Step::new("user", "id").arg("-u"))?;
        facts.root = user.trim() == "0";
        if !facts.root && facts.sudo {
            let probe = Step::new("sudo", "sudo").args(["-n", "true"]);
            facts.sudo_without_password = runner.capture(&probe)?.0.is_success();
        }
    }
    Ok(means(facts))
}

pub fn on_path(program: &str) -> bool {
    found_in(std::env::var_os("PATH").as_deref(), program)
}

fn found_in(path: Option<&OsStr>, program: &str) -> bool {
    path.is_some_and(|path| std::env::split_paths(path).any(|dir| dir.join(program).is_file()))
}

/// A step that calls apt-get with `args`, without questions, as root.
pub fn apt_get<'a>(
    name: &str,
    sudo: bool,
    limit: Duration,
    args: impl IntoIterator<Item = &'a str>,
) -> Step {
    const QUIET: &str = "DEBIAN_FRONTEND=noninteractive";
    let step = if sudo {
        // sudo clears the environment, so the variable is set behind it. And we
        // may not kill what runs as root: `timeout` does that, a little before
        // the step's own limit.
        let seconds = limit.as_secs().saturating_sub(15).max(1).to_string();
        Step::new(name, "sudo")
            .args(["-n", "timeout", "--kill-after=10", &seconds])
            .args(["env", QUIET, "apt-get"])
    } else {
        let (key, value) = QUIET.split_once('=').unwrap_or((QUIET, ""));
        Step::new(name, "apt-get").env(key, value)
    };
    // Freshly booted machines often run an update of their own: wait for it.
    step.args(["-o", "DPkg::Lock::Timeout=300"]).args(args)
}

/// The steps that install `packages`.
fn install_steps(sudo: bool, limit: Duration, packages: &[&str]) -> [Step; 2] {
    let install = ["install", "--yes", "--no-install-recommends"];
    [
        apt_get("apt-update", sudo, limit, ["update"]),
        apt_get(
            "apt-install",
            sudo,
            limit,
            install.iter().chain(packages).copied(),
        ),
    ]
}

/// The step that asks dpkg about [`PACKAGES`]; [`missing`] reads its answer.
fn query() -> Step {
    Step::new("packages", "dpkg-query")
        .args(["--show", "--showformat"])
        .arg("${Package} ${Architecture} ${db:Status-Status}\\n")
        .args(PACKAGES)
}

/// Those of [`PACKAGES`] that are not installed for `architecture`.
///
/// A package that dpkg never heard of is absent from its answer; one that was
/// removed may be listed as `config-files`, and a foreign architecture's is of
/// no use to us.
fn missing(answer: &str, architecture: &str) -> Vec<&'static str> {
    let installed = |package: &str| {
        answer.lines().any(|line| {
            let mut fields = line.split_whitespace();
            fields.next() == Some(package)
                && fields
                    .next()
                    .is_some_and(|found| found == architecture || found == "all")
                && fields.next() == Some("installed")
        })
    };
    PACKAGES
        .into_iter()
        .filter(|package| !installed(package))
        .collect()
}

/// Those of [`PACKAGES`] that are not installed here; all, where dpkg is absent.
fn missing_here(runner: &Runner) -> anyhow::Result<Vec<&'static str>> {
    if !on_path("dpkg-query") || !on_path("dpkg") {
        return Ok(PACKAGES.to_vec());
    }
    let architecture = Step::new("architecture", "dpkg").arg("--print-architecture");
    let (_, architecture) = runner.capture(&architecture)?;
    // Its exit code is 1 as soon as one package is unknown, which is no error.
    let (_, answer) = runner.capture(&query())?;
    Ok(missing(&answer, architecture.trim()))
}

/// Which adapters must answer, and who is asked.
pub struct Wanted<'a> {
    /// Ask the release build of `tqcheck`.
    pub release: bool,
    /// Backends that must have one, separated by commas; `None` where any
    /// adapter will do.
    pub backends: Option<&'a str>,
}

impl Wanted<'_> {
    fn step(&self, name: &str) -> Step {
        let args = match self.backends {
            Some(backends) => vec!["adapters", "--require", backends],
            None => vec!["adapters"],
        };
        tqcheck(name, self.release, args)
    }
}

impl std::fmt::Display for Wanted<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.backends {
            Some(backends) => write!(f, "a usable adapter for each of {backends}"),
            None => f.write_str("a usable adapter"),
        }
    }
}

/// Makes sure that the adapters in `wanted` answer, installing drivers if
/// `install` allows it. Where they do not, the error carries `tqcheck`'s code.
pub fn ensure(runner: &mut Runner, wanted: &Wanted<'_>, install: bool) -> anyhow::Result<()> {
    let step = wanted.step("adapters");
    let Some(refusal) = ask(runner, &step)? else {
        return Ok(());
    };
    let missing = missing_here(runner)?;
    if missing.is_empty() {
        return Err(refusal).context(all_installed(wanted));
    }
    let sudo = match means_here(runner, install)? {
        Means::Root => false,
        Means::Sudo => true,
        Means::None(reason) => {
            return Err(refusal).context(cannot_install(wanted, reason, &missing));
        }
    };
    for step in install_steps(sudo, runner.limit(), &missing) {
        runner.require(&step)?;
    }
    match ask(runner, &wanted.step("adapters-again"))? {
        None => Ok(()),
        Some(refusal) => Err(refusal).context(all_installed(wanted)),
    }
}

/// Runs `step`, which lists adapters. Returns its failure if that says that an
/// adapter is missing; any other failure is an error.
fn ask(runner: &mut Runner, step: &Step) -> anyhow::Result<Option<StepError>> {
    let outcome = runner.run(step)?;
    match outcome {
        Outcome::Exited(status) => match status.code() {
            Some(0) => Ok(None),
            Some(NO_ADAPTER) => Ok(Some(StepError::new(step, outcome))),
            // Not passed on as it is: `verify` would look as if it had found a
            // violation if `tqcheck` exited with 1 here.
            _ => bail!(
                "step `{}`: `{}` ended with {outcome}, expected exit code 0 (adapters answer) or \
                 {NO_ADAPTER} (none does)",
                step.name(),
                step.command_line()
            ),
        },
        Outcome::TimedOut { .. } | Outcome::Interrupted => {
            Err(StepError::new(step, outcome).into())
        }
    }
}

fn cannot_install(wanted: &Wanted<'_>, reason: &str, missing: &[&str]) -> String {
    let packages = missing.join(" ");
    format!(
        "expected {wanted}, and found one wanting. Nothing was installed: {reason}. \
         Missing are the packages {packages}: on Debian or Ubuntu run \
         `apt-get update && apt-get install --no-install-recommends {packages}` as root; elsewhere, \
         install a Vulkan loader with Mesa's lavapipe, and Mesa's EGL with its llvmpipe driver"
    )
}

fn all_installed(wanted: &Wanted<'_>) -> String {
    let set = STEERING
        .iter()
        .filter_map(|key| {
            Some(format!(
                "{key}={}",
                std::env::var_os(key)?.to_string_lossy()
            ))
        })
        .collect::<Vec<_>>();
    let set = if set.is_empty() {
        "none".to_owned()
    } else {
        set.join(" ")
    };
    format!(
        "expected {wanted}, and found one wanting although the packages {} are installed. \
         Variables that steer the choice of driver: {set}",
        PACKAGES.join(" ")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_secs(2400);

    fn answer(architecture: &str, status: &str) -> String {
        PACKAGES
            .iter()
            .map(|package| format!("{package} {architecture} {status}\n"))
            .collect()
    }

    #[test]
    fn nothing_is_missing_where_all_is_installed() {
        assert!(missing(&answer("amd64", "installed"), "amd64").is_empty());
        assert!(missing(&answer("all", "installed"), "amd64").is_empty());
    }

    #[test]
    fn what_dpkg_does_not_list_as_installed_here_is_missing() {
        assert_eq!(missing("", "amd64"), PACKAGES);
        assert_eq!(missing(&answer("i386", "installed"), "amd64"), PACKAGES);
        assert_eq!(missing(&answer("amd64", "config-files"), "amd64"), PACKAGES);
        assert_eq!(
            missing(&answer("amd64", "not-installed"), "amd64"),
            PACKAGES
        );
    }

    #[test]
    fn a_native_package_counts_beside_a_foreign_one() {
        let both = format!(
            "{}{}",
            answer("i386", "installed"),
            answer("amd64", "installed")
        );
        assert!(missing(&both, "amd64").is_empty());
    }

    #[test]
    fn a_name_that_only_begins_alike_does_not_count() {
        let text = answer("amd64", "installed").replace("libegl1 ", "libegl1-dev ");
        assert_eq!(missing(&text, "amd64"), ["libegl1"]);
    }

    #[test]
    fn means_follow_from_the_facts() {
        let root = Facts {
            allowed: true,
            apt_get: true,
            root: true,
            sudo: false,
            sudo_without_password: false,
        };
        assert_eq!(means(root), Means::Root);
        let user = Facts {
            root: false,
            ..root
        };
        let sudoer = Facts { sudo: true, ..user };
        let ready = Facts {
            sudo_without_password: true,
            ..sudoer
        };
        assert_eq!(means(ready), Means::Sudo);
        for (facts, word) in [
            (
                Facts {
                    allowed: false,
                    ..root
                },
                "--no-install",
            ),
            (
                Facts {
                    apt_get: false,
                    ..root
                },
                "apt-get, expected",
            ),
            (user, "needs root"),
            (sudoer, "password"),
        ] {
            let Means::None(reason) = means(facts) else {
                panic!("{facts:?} may install");
            };
            assert!(reason.contains(word), "{facts:?}: {reason}");
        }
    }

    #[test]
    fn root_calls_apt_get_itself() {
        let [update, install] = install_steps(false, LIMIT, &["libegl1", "libvulkan1"]);
        assert_eq!(
            update.command_line(),
            "DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=300 update"
        );
        assert!(
            install
                .command_line()
                .ends_with("install --yes --no-install-recommends libegl1 libvulkan1")
        );
    }

    #[test]
    fn behind_sudo_the_limit_and_the_environment_still_hold() {
        let [update, _] = install_steps(true, LIMIT, &["libegl1"]);
        assert_eq!(
            update.command_line(),
            "sudo -n timeout --kill-after=10 2385 env DEBIAN_FRONTEND=noninteractive \
             apt-get -o DPkg::Lock::Timeout=300 update"
        );
        let short = apt_get("x", true, Duration::from_secs(1), ["update"]);
        assert!(short.command_line().contains("--kill-after=10 1 env"));
    }

    #[test]
    fn asks_for_the_backends_that_are_wanted() {
        let line = |release, backends| Wanted { release, backends }.step("adapters").command_line();
        assert_eq!(
            line(true, None),
            "cargo run --quiet --release --package tqcheck --bin tqcheck -- adapters"
        );
        assert_eq!(
            line(false, Some("vulkan,gl")),
            "cargo run --quiet --package tqcheck --bin tqcheck -- adapters --require vulkan,gl"
        );
    }

    #[test]
    fn a_refusal_to_install_names_what_is_missing_and_why() {
        let wanted = Wanted {
            release: true,
            backends: Some("vulkan,gl"),
        };
        let text = cannot_install(&wanted, "--no-install was given", &["libegl1"]);
        assert!(text.contains("each of vulkan,gl"), "{text}");
        assert!(text.contains("--no-install was given"), "{text}");
        assert!(text.contains("packages libegl1:"), "{text}");
    }

    #[test]
    fn looks_a_program_up_on_the_path() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("apt-get"), "").unwrap();
        let path = std::env::join_paths([std::path::Path::new("/nowhere"), dir.path()]).unwrap();
        assert!(found_in(Some(&path), "apt-get"));
        assert!(!found_in(Some(&path), "sudo"));
        assert!(!found_in(None, "apt-get"));
    }

    #[cfg(unix)]
    mod asking {
        use super::*;
        use std::sync::Arc;

        fn ask_one_that_exits_with(code: i32) -> anyhow::Result<Option<StepError>> {
            let mut runner = Runner::new(LIMIT, Arc::default(), std::env::temp_dir());
            let step = Step::new("adapters", "sh").args(["-c", &format!("exit {code}")]);
            ask(&mut runner, &step)
        }

        #[test]
        fn tells_an_adapter_none_and_a_broken_harness_apart() {
            assert!(ask_one_that_exits_with(0).unwrap().is_none());
            let refusal = ask_one_that_exits_with(3).unwrap().unwrap();
            assert_eq!(refusal.exit_code(), 3);
            let error = ask_one_that_exits_with(1).unwrap_err();
            assert!(error.downcast_ref::<StepError>().is_none());
            assert!(error.to_string().contains("exit code 1"), "{error}");
        }

        #[test]
        fn the_exit_code_survives_the_explanation() {
            let refusal = ask_one_that_exits_with(3).unwrap().unwrap();
            let error = Err::<(), _>(refusal).context("why").unwrap_err();
            let code = error.downcast_ref::<StepError>().map(StepError::exit_code);
            assert_eq!(code, Some(3));
        }
    }
}
