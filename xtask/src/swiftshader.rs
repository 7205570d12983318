//! Fetches SwiftShader, a software Vulkan driver that shares no code with
//! Mesa's. Two drivers that err in the same way are less likely than one.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use serde_json::Value;

use crate::drivers::{self, Means};
use crate::runner::{Runner, Step, quote};

/// The Debian package that carries the driver.
const PACKAGE: &str = "chromium-common";
const LIBRARY: &str = "libvk_swiftshader.so";
const ICD: &str = "vk_swiftshader_icd.json";

/// Puts the driver and its manifest into `dir`; returns the manifest's path.
/// `refresh` allows apt's package lists to be updated where that is needed.
pub fn fetch(runner: &mut Runner, dir: &Path, refresh: bool) -> anyhow::Result<PathBuf> {
    for program in ["apt-get", "apt-cache", "dpkg-deb"] {
        if !drivers::on_path(program) {
            bail!(
                "found no {program} on PATH: SwiftShader is taken from Debian's package {PACKAGE}, \
                 expected a Debian machine"
            );
        }
    }
    // Absolute before anything else: steps run in directories of their own.
    let dir = std::path::absolute(dir)
        .with_context(|| format!("cannot make {} an absolute path", dir.display()))?;
    find_candidate(runner, refresh)?;

    let unpacked = tempfile::tempdir().context("cannot create a temporary directory")?;
    runner.require(&download_step(unpacked.path()))?;
    let archive = find(unpacked.path(), |name| {
        Path::new(name).extension() == Some(OsStr::new("deb"))
    })?
    .with_context(|| {
        format!(
            "`apt-get download {PACKAGE}` succeeded and left no .deb file in {}",
            unpacked.path().display()
        )
    })?;
    let tree = unpacked.path().join("tree");
    runner.require(
        &Step::new("unpack", "dpkg-deb")
            .arg("-x")
            .arg(&archive)
            .arg(&tree),
    )?;

    fs::create_dir_all(&dir).with_context(|| format!("cannot create {}", dir.display()))?;
    let library = dir.join(LIBRARY);
    let source = find_unpacked(&tree, LIBRARY)?;
    // A file that a running process has mapped must not be overwritten in
    // place; one that is renamed over stays whole for that process.
    let partial = dir.join(format!("{LIBRARY}.partial"));
    fs::copy(&source, &partial)
        .with_context(|| format!("cannot copy {} to {}", source.display(), partial.display()))?;
    fs::rename(&partial, &library)
        .with_context(|| format!("cannot rename {} to {LIBRARY}", partial.display()))?;

    let source = find_unpacked(&tree, ICD)?;
    let text =
        fs::read_to_string(&source).with_context(|| format!("cannot read {}", source.display()))?;
    let text = with_library_path(&text, &library)
        .with_context(|| format!("{ICD} of the package {PACKAGE}"))?;
    let icd = dir.join(ICD);
    // Last, for its presence says that the driver is complete.
    fs::write(&icd, text).with_context(|| format!("cannot write {}", icd.display()))?;
    Ok(icd)
}

/// The manifest in `dir`, if an earlier [`fetch`] left one there.
pub fn fetched(dir: &Path) -> Option<PathBuf> {
    let icd = dir.join(ICD);
    (icd.is_file() && dir.join(LIBRARY).is_file()).then_some(icd)
}

/// The assignment that makes the Vulkan loader use this driver alone.
pub fn environment_line(icd: &Path) -> String {
    format!("VK_ICD_FILENAMES={}", quote(icd.as_os_str()))
}

/// Makes `step` see SwiftShader and nothing else.
pub fn alone(step: Step, icd: &Path) -> Step {
    step.env("VK_ICD_FILENAMES", icd)
        // The newer names of that variable would win over it or add to it.
        .env_remove("VK_DRIVER_FILES")
        .env_remove("VK_ADD_DRIVER_FILES")
        // SwiftShader has no GL. An empty vendor list leaves EGL without a
        // driver, so that Mesa's GL does not run a second time.
        .env("__EGL_VENDOR_LIBRARY_FILENAMES", "/dev/null")
}

fn find_candidate(runner: &mut Runner, refresh: bool) -> anyhow::Result<()> {
    if candidate(&policy(runner)?).is_some() {
        return Ok(());
    }
    // A fresh machine or container has no package lists at all.
    let lists = match drivers::means_here(runner, refresh)? {
        Means::Root => {
            update(runner, false)?;
            "after apt-get update".to_owned()
        }
        Means::Sudo => {
            update(runner, true)?;
            "after apt-get update".to_owned()
        }
        Means::None(reason) => format!("in package lists that were not updated ({reason})"),
    };
    if candidate(&policy(runner)?).is_some() {
        return Ok(());
    }
    let release = fs::read_to_string("/etc/os-release").unwrap_or_default();
    bail!(
        "found no package {PACKAGE} {lists} on {}, expected Debian: Ubuntu has Chromium as a snap \
         only, without this package. There, run the command in a Debian container and copy the \
         directory over",
        pretty_name(&release)
    )
}

fn update(runner: &mut Runner, sudo: bool) -> anyhow::Result<()> {
    runner.require(&drivers::apt_get(
        "apt-update",
        sudo,
        runner.limit(),
        ["-qq", "update"],
    ))
}

fn policy(runner: &Runner) -> anyhow::Result<String> {
    let step = Step::new("policy", "apt-cache").args(["policy", PACKAGE]);
    Ok(runner.capture(&step)?.1)
}

/// The version that apt would download, by the answer of `apt-cache policy`.
fn candidate(policy: &str) -> Option<&str> {
    policy
        .lines()
        .find_map(|line| line.trim().strip_prefix("Candidate:"))
        .map(str::trim)
        .filter(|version| *version != "(none)")
}

/// The distribution's name by the text of `/etc/os-release`.
fn pretty_name(os_release: &str) -> &str {
    os_release
        .lines()
        .find_map(|line| line.strip_prefix("PRETTY_NAME="))
        .map_or("an unknown distribution", |name| name.trim_matches('"'))
}

fn download_step(dir: &Path) -> Step {
    Step::new("download", "apt-get")
        // As root, apt would hand the download to a user who cannot write to a
        // temporary directory of ours, and warn of it.
        .args(["-o", "APT::Sandbox::User=root"])
        // Errors alone: the one line on stdout is ours, for a shell to take.
        .args(["-qq", "download", PACKAGE])
        .in_dir(dir)
}

fn find_unpacked(tree: &Path, file: &str) -> anyhow::Result<PathBuf> {
    find(tree, |name| name == file)?.with_context(|| {
        format!("found no {file} in the package {PACKAGE}, expected it below usr/lib/chromium")
    })
}

/// The first file below `dir` whose name `matches`, in the order of names.
fn find(dir: &Path, matches: impl Fn(&OsStr) -> bool + Copy) -> anyhow::Result<Option<PathBuf>> {
    let mut entries = fs::read_dir(dir)
        .and_then(Iterator::collect::<std::io::Result<Vec<_>>>)
        .with_context(|| format!("cannot list {}", dir.display()))?;
    entries.sort_by_key(fs::DirEntry::file_name);
    for entry in entries {
        let path = entry.path();
        // Of the entry itself: a symbolic link must not lead out of the tree.
        let kind = entry
            .file_type()
            .with_context(|| format!("cannot read the type of {}", path.display()))?;
        if kind.is_dir() {
            if let Some(found) = find(&path, matches)? {
                return Ok(Some(found));
            }
        } else if kind.is_file() && matches(&entry.file_name()) {
            return Ok(Some(path));
        }
    }
    Ok(None)
}

/// The driver manifest `text` with `library` as its library.
///
/// Chromium's names the library relative to itself, which the loader has not
/// always read in the same way; an absolute path leaves no room for that.
fn with_library_path(text: &str, library: &Path) -> anyhow::Result<String> {
    let library = library
        .to_str()
        .with_context(|| format!("the path {} is not UTF-8", library.display()))?;
    let mut manifest: Value = serde_json::from_str(text).context("is not JSON")?;
    match manifest.pointer_mut("/ICD/library_path") {
        Some(Value::String(path)) => library.clone_into(path),
        Some(other) => bail!("found {other} at ICD.library_path, expected a string"),
        None => bail!("found nothing at ICD.library_path, expected a string"),
    }
    let mut text = serde_json::to_string_pretty(&manifest).context("cannot be written as JSON")?;
    text.push('\n');
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    const CHROMIUM: &str = r#"{"file_format_version": "1.0.0", "ICD": {"library_path": "./libvk_swiftshader.so", "api_version": "1.0.5"}}"#;

    #[test]
    fn the_library_path_becomes_absolute_and_the_rest_stays() {
        let library = Path::new("/some where/libvk_swiftshader.so");
        let text = with_library_path(CHROMIUM, library).unwrap();
        let found: Value = serde_json::from_str(&text).unwrap();
        let mut expected: Value = serde_json::from_str(CHROMIUM).unwrap();
        expected["ICD"]["library_path"] = "/some where/libvk_swiftshader.so".into();
        assert_eq!(found, expected);
        // Once more changes nothing.
        assert_eq!(with_library_path(&text, library).unwrap(), text);
    }

    #[test]
    fn a_manifest_without_a_library_path_is_refused() {
        let error = |text| {
            let error = with_library_path(text, Path::new("/x.so")).unwrap_err();
            format!("{error:#}")
        };
        assert!(error("{").contains("is not JSON"));
        assert!(error("[]").contains("found nothing at ICD.library_path"));
        assert!(error(r#"{"ICD": {}}"#).contains("found nothing"));
        assert!(error(r#"{"ICD": {"library_path": 7}}"#).contains("found 7 at"));
    }

    #[test]
    fn reads_the_candidate_of_a_policy() {
        let policy = "chromium-common:\n  Installed: (none)\n  Candidate: 1.2-1~deb12u1\n";
        assert_eq!(candidate(policy), Some("1.2-1~deb12u1"));
        assert_eq!(candidate("chromium-common:\n  Candidate: (none)\n"), None);
        assert_eq!(candidate(""), None);
    }

    #[test]
    fn reads_the_name_of_a_distribution() {
        let text = "NAME=\"Ubuntu\"\nPRETTY_NAME=\"Ubuntu 24.04.1 LTS\"\n";
        assert_eq!(pretty_name(text), "Ubuntu 24.04.1 LTS");
        assert_eq!(pretty_name(""), "an unknown distribution");
    }

    #[test]
    fn a_path_with_spaces_is_quoted_for_the_shell() {
        assert_eq!(
            environment_line(Path::new("/a/icd.json")),
            "VK_ICD_FILENAMES=/a/icd.json"
        );
        assert_eq!(
            environment_line(Path::new("/a b/icd.json")),
            "VK_ICD_FILENAMES='/a b/icd.json'"
        );
    }

    #[test]
    fn finds_a_file_however_deep_it_lies() {
        let dir = tempfile::tempdir().unwrap();
        let deep = dir.path().join("usr/lib/chromium");
        fs::create_dir_all(&deep).unwrap();
        // A directory of that name is not the file.
        fs::create_dir(dir.path().join(LIBRARY)).unwrap();
        fs::write(deep.join(LIBRARY), "").unwrap();
        assert_eq!(
            find_unpacked(dir.path(), LIBRARY).unwrap(),
            deep.join(LIBRARY)
        );
        let error = find_unpacked(dir.path(), ICD).unwrap_err().to_string();
        assert!(error.contains(ICD), "{error}");
    }

    #[test]
    fn a_driver_counts_as_fetched_with_both_its_files() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join(ICD), "").unwrap();
        assert_eq!(fetched(dir.path()), None);
        fs::write(dir.path().join(LIBRARY), "").unwrap();
        assert_eq!(fetched(dir.path()), Some(dir.path().join(ICD)));
    }
}
