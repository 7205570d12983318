//! Saved cases that never rot, and failures that are known.
//!
//! `regressions/<property>/<name>.toml` holds a case that once broke its property, with the story of how it was found.
//! `regressions/proptest/<property>.txt` holds proptest's own seeds. `regressions/expected.toml` lists known
//! failures of adapters.

use std::path::{Path, PathBuf};
use std::{fs, io};

use anyhow::{Context as _, Result, bail, ensure};
use jiff::civil::Date;
use serde::{Deserialize, Serialize};

use crate::adapters::Device;
use crate::case::Case;
use crate::properties::{self, Property};
use crate::runner::Broken;

/// The directory of saved cases: `TQCHECK_REGRESSIONS`, else the repository's own, from whatever working
/// directory, else `regressions` in this one.
#[must_use]
pub fn dir() -> PathBuf {
    if let Some(dir) = std::env::var_os("TQCHECK_REGRESSIONS") {
        return PathBuf::from(dir);
    }
    let repository = Path::new(env!("CARGO_MANIFEST_DIR")).join("../regressions");
    repository
        .canonicalize()
        .unwrap_or_else(|_| PathBuf::from("regressions"))
}

/// A saved case.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Saved {
    /// How it was found.
    pub found: Found,
    /// The case.
    pub case: Case,
}

/// How a case was found.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Found {
    /// Adapter that it was found on.
    pub adapter: String,
    /// Its driver.
    pub driver: String,
    /// Seed of the run.
    pub seed: u64,
    /// Version of tqcheck.
    pub tqcheck: String,
    /// What it broke there.
    pub verdict: String,
}

impl Saved {
    /// Parses a saved case; its property has to exist.
    ///
    /// # Errors
    /// Text that is no saved case, a case that cannot be run, a property that does not exist.
    pub fn parse(text: &str) -> Result<(Self, &'static Property)> {
        let saved: Self = toml::from_str(text)?;
        saved.case.check()?;
        let property = properties::by_name(&saved.case.property)
            .with_context(|| format!("no property \"{}\"", saved.case.property))?;
        Ok((saved, property))
    }

    /// Reads a saved case.
    ///
    /// # Errors
    /// As [`Saved::parse`], with the path.
    pub fn read(path: &Path) -> Result<(Self, &'static Property)> {
        let text = fs::read_to_string(path).with_context(|| path.display().to_string())?;
        Self::parse(&text).with_context(|| path.display().to_string())
    }
}

/// Saves a failure's shrunk case, its data literally where that is small, and returns the file.
///
/// # Errors
/// A directory that cannot be written.
pub fn save(dir: &Path, device: &Device, seed: u64, broken: &Broken) -> io::Result<PathBuf> {
    let saved = Saved {
        found: Found {
            adapter: device.label.clone(),
            driver: device.driver.clone(),
            seed,
            tqcheck: env!("CARGO_PKG_VERSION").to_owned(),
            verdict: broken.violation.to_string(),
        },
        case: broken.shrunk.clone().literal(),
    };
    let text = toml::to_string(&saved).map_err(io::Error::other)?;
    let folder = dir.join(&saved.case.property);
    fs::create_dir_all(&folder)?;
    // The name tells the case's shape; the checksum keeps different cases apart and equal ones together.
    let case = saved.case.to_toml();
    let name = format!(
        "d{}-r{}-{:08x}.toml",
        saved.case.head_dim,
        saved.case.rows,
        crc32fast::hash(case.as_bytes())
    );
    let path = folder.join(name);
    fs::write(&path, text)?;
    Ok(path)
}

/// Every saved case below the given paths (files or directories); of [`dir`] if none is given.
///
/// # Errors
/// A path that does not exist, and, since a case that is skipped would rot, a file that is no saved case.
pub fn load(paths: &[PathBuf]) -> Result<Vec<(PathBuf, Saved, &'static Property)>> {
    let mut files = Vec::new();
    if paths.is_empty() {
        for property in properties::ALL {
            let folder = dir().join(property.name);
            if folder.is_dir() {
                collect(&folder, &mut files)?;
            }
        }
        unknown_folders(&dir())?;
    }
    for path in paths {
        if path.is_dir() {
            let before = files.len();
            collect(path, &mut files)?;
            ensure!(
                files.len() > before,
                "{}: no saved case in it",
                path.display()
            );
        } else {
            ensure!(path.is_file(), "{}: there is no such file", path.display());
            files.push(path.clone());
        }
    }
    files.sort();
    files
        .into_iter()
        .map(|path| {
            let (saved, property) = Saved::read(&path)?;
            Ok((path, saved, property))
        })
        .collect()
}

fn collect(folder: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    for entry in fs::read_dir(folder).with_context(|| folder.display().to_string())? {
        let path = entry?.path();
        if path.is_dir() {
            collect(&path, files)?;
        } else if path.extension().is_some_and(|e| e == "toml") {
            files.push(path);
        } else {
            bail!("{}: not a .toml file", path.display());
        }
    }
    Ok(())
}

/// A folder that belongs to no property is one whose cases nobody replays.
fn unknown_folders(dir: &Path) -> Result<()> {
    /// Folders of other things than saved cases.
    const OTHERS: [&str; 3] = ["proptest", "fuzz", "seeds"];
    if !dir.is_dir() {
        return Ok(());
    }
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        let name = path.file_name().map(|n| n.to_string_lossy().into_owned());
        let name = name.unwrap_or_default();
        let known = OTHERS.contains(&name.as_str()) || properties::by_name(&name).is_some();
        ensure!(
            !path.is_dir() || known,
            "{}: no property \"{name}\": nobody replays its cases",
            path.display()
        );
    }
    Ok(())
}

/// A known failure of an adapter.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Expected {
    /// Text in the adapter's `backend:name`.
    pub adapter: String,
    /// Text in its driver's name and version.
    pub driver: String,
    /// Name of the property that fails.
    pub property: String,
    /// Text in the violation: a failure for another reason is not expected.
    pub reason: String,
    /// Where it was reported.
    pub link: String,
    /// The first day on which the entry no longer counts.
    pub expires: Date,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct ExpectedFile {
    #[serde(default)]
    expected: Vec<Expected>,
}

/// What the list of known failures makes of a result.
#[derive(Clone, Debug, PartialEq)]
pub enum Judgement {
    /// Nothing fails and nothing was expected to.
    Pass,
    /// It fails as expected.
    ExpectedFailure(String),
    /// It fails, for the given reason.
    Fail(String),
}

/// Reads `expected.toml`; none is an empty list.
///
/// # Errors
/// A file that does not parse, or an entry for a property that does not exist.
pub fn expected(dir: &Path) -> Result<Vec<Expected>> {
    let path = dir.join("expected.toml");
    if !path.exists() {
        return Ok(Vec::new());
    }
    let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
    let file: ExpectedFile = toml::from_str(&text).with_context(|| path.display().to_string())?;
    for entry in &file.expected {
        ensure!(
            properties::by_name(&entry.property).is_some(),
            "{}: no property \"{}\"",
            path.display(),
            entry.property
        );
    }
    Ok(file.expected)
}

/// Judges one result (`failure`: what was violated, if anything) against the list.
#[must_use]
pub fn judge(
    expected: &[Expected],
    adapter: &str,
    driver: &str,
    property: &str,
    failure: Option<&str>,
    today: Date,
) -> Judgement {
    let entry = expected.iter().find(|e| {
        adapter.contains(&e.adapter) && driver.contains(&e.driver) && property == e.property
    });
    match (entry, failure) {
        (None, None) => Judgement::Pass,
        (None, Some(failure)) => Judgement::Fail(failure.to_owned()),
        (Some(entry), _) if today >= entry.expires => Judgement::Fail(format!(
            "the expected failure ({}) expired on {}",
            entry.link, entry.expires
        )),
        (Some(entry), None) => Judgement::Fail(format!(
            "it was expected to fail ({}) and holds: remove the entry",
            entry.link
        )),
        (Some(entry), Some(failure)) if failure.contains(&entry.reason) => {
            Judgement::ExpectedFailure(entry.link.clone())
        }
        (Some(entry), Some(failure)) => Judgement::Fail(format!(
            "expected to fail for \"{}\", failed for another reason: {failure}",
            entry.reason
        )),
    }
}

/// Today, in UTC.
#[must_use]
pub fn today() -> Date {
    jiff::Timestamp::now()
        .to_zoned(jiff::tz::TimeZone::UTC)
        .date()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry() -> Expected {
        Expected {
            adapter: "vulkan:Soft".to_owned(),
            driver: "5.".to_owned(),
            property: "attention".to_owned(),
            reason: "element 3".to_owned(),
            link: "a report".to_owned(),
            expires: Date::constant(2030, 1, 1),
        }
    }

    #[test]
    fn known_failures_are_judged_by_adapter_driver_property_reason_and_date() {
        let list = [entry()];
        let early = Date::constant(2029, 12, 31);
        let on = |adapter: &str, driver: &str, property: &str, failure: Option<&str>, day| {
            judge(&list, adapter, driver, property, failure, day)
        };
        let soft = "vulkan:Soft GPU";
        let fails = |judgement| matches!(judgement, Judgement::Fail(_));
        let here = on(soft, "5.1", "attention", Some("at element 3"), early);
        assert_eq!(here, Judgement::ExpectedFailure("a report".to_owned()));
        assert!(
            fails(on(soft, "5.1", "attention", Some("at element 4"), early)),
            "another reason"
        );
        assert!(
            fails(on(soft, "5.1", "attention", None, early)),
            "an unexpected pass"
        );
        let late = Date::constant(2030, 1, 1);
        assert!(
            fails(on(soft, "5.1", "attention", Some("at element 3"), late)),
            "expired"
        );
        assert!(
            fails(on(soft, "6.0", "attention", Some("at element 3"), early)),
            "other driver"
        );
        assert!(fails(on(
            "gl:Soft",
            "5.1",
            "attention",
            Some("at element 3"),
            early
        )));
        assert_eq!(on(soft, "5.1", "snapshot", None, early), Judgement::Pass);
    }

    #[test]
    fn the_list_parses_and_names_properties() {
        let dir = tempfile::tempdir().expect("a directory");
        assert_eq!(expected(dir.path()).expect("no list"), []);
        let text = |property: &str| {
            format!(
                "[[expected]]\nadapter = \"a\"\ndriver = \"d\"\nproperty = \"{property}\"\n\
                 reason = \"r\"\nlink = \"l\"\nexpires = \"2030-01-01\"\n"
            )
        };
        let path = dir.path().join("expected.toml");
        fs::write(&path, text("attention")).expect("written");
        assert_eq!(expected(dir.path()).expect("a list").len(), 1);
        for bad in [
            text("attenshun"),
            text("attention").replace("2030-01-01", "soon"),
        ] {
            fs::write(&path, bad).expect("written");
            assert!(expected(dir.path()).is_err());
        }
        expected(&super::dir()).expect("the repository's own list parses");
    }

    #[test]
    fn what_is_no_saved_case_is_an_error() {
        let dir = tempfile::tempdir().expect("a directory");
        let at = |name: &str| dir.path().join(name);
        assert!(load(&[at("missing.toml")]).is_err());
        assert!(
            load(&[dir.path().to_owned()]).is_err(),
            "an empty directory"
        );
        fs::write(at("a.toml"), "property = 1").expect("written");
        assert!(load(&[dir.path().to_owned()]).is_err(), "no case");
        fs::remove_file(at("a.toml")).expect("removed");
        fs::write(at("a.txt"), "").expect("written");
        assert!(load(&[dir.path().to_owned()]).is_err(), "no TOML");
        load(&[]).expect("the repository's own cases parse");
        assert!(unknown_folders(dir.path()).is_ok());
        fs::create_dir(at("attenshun")).expect("made");
        assert!(unknown_folders(dir.path()).is_err());
    }
}
