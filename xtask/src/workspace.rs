//! Where the workspace is, and the private directory that Mesa asks for.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use tempfile::TempDir;

/// The workspace this program belongs to.
pub struct Workspace {
    root: PathBuf,
}

impl Workspace {
    /// Finds the root from this package's own directory, so that the commands
    /// work from anywhere inside the workspace.
    pub fn find() -> anyhow::Result<Self> {
        // Cargo sets the variable on `cargo run`; it wins over the path that
        // was compiled in, for a checkout can be moved after it was built.
        let package = std::env::var_os("CARGO_MANIFEST_DIR")
            .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")), PathBuf::from);
        Self::above(&package)
    }

    fn above(package: &Path) -> anyhow::Result<Self> {
        let root = package
            .parent()
            .with_context(|| format!("{} has no parent directory", package.display()))?;
        let manifest = root.join("Cargo.toml");
        if !manifest.is_file() {
            bail!(
                "found no workspace: expected its manifest at {}, one directory above the package xtask",
                manifest.display()
            );
        }
        Ok(Self {
            root: root.to_path_buf(),
        })
    }

    pub fn root(&self) -> &Path {
        &self.root
    }

    pub fn swiftshader_dir(&self) -> PathBuf {
        self.root.join("target").join("swiftshader")
    }
}

/// A directory for `XDG_RUNTIME_DIR`, removed when dropped.
///
/// Mesa's EGL warns without one, and some of its versions fail.
pub struct RuntimeDir(Option<TempDir>);

impl RuntimeDir {
    /// Creates the directory unless `current` already names one.
    pub fn unless_set(current: Option<OsString>) -> anyhow::Result<Self> {
        if current.is_some_and(|value| !value.is_empty()) {
            return Ok(Self(None));
        }
        let mut builder = tempfile::Builder::new();
        builder.prefix("xtask-runtime-");
        // The XDG base directory specification demands 0700.
        #[cfg(unix)]
        builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o700));
        let dir = builder
            .tempdir()
            .context("cannot create a temporary XDG_RUNTIME_DIR")?;
        Ok(Self(Some(dir)))
    }

    pub fn path(&self) -> Option<&OsStr> {
        self.0.as_ref().map(|dir| dir.path().as_os_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_the_workspace_that_holds_this_package() {
        let workspace = Workspace::find().unwrap();
        assert!(workspace.root().join("xtask/Cargo.toml").is_file());
    }

    #[test]
    fn names_the_manifest_it_missed() {
        let empty = tempfile::tempdir().unwrap();
        let Err(error) = Workspace::above(&empty.path().join("xtask")) else {
            panic!("found a workspace in an empty directory");
        };
        let manifest = empty.path().join("Cargo.toml");
        assert!(error.to_string().contains(&*manifest.to_string_lossy()));
    }

    #[test]
    fn leaves_a_runtime_directory_alone_that_is_set() {
        let dir = RuntimeDir::unless_set(Some("/run/user/1000".into())).unwrap();
        assert_eq!(dir.path(), None);
    }

    #[cfg(unix)]
    #[test]
    fn makes_a_private_runtime_directory_and_removes_it() {
        use std::os::unix::fs::PermissionsExt;
        for current in [None, Some(OsString::new())] {
            let dir = RuntimeDir::unless_set(current).unwrap();
            let path = PathBuf::from(dir.path().unwrap());
            let mode = path.metadata().unwrap().permissions().mode();
            assert_eq!(mode & 0o777, 0o700);
            drop(dir);
            assert!(!path.exists());
        }
    }
}
