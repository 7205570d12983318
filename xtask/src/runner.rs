//! Runs child processes as named steps, each under a time limit.
//!
//! A child gets a process group of its own (a job object on Windows), so that
//! what it started is killed along with it. The price is that a terminal's
//! Ctrl-C no longer reaches it; [`watch_for_interrupts`] makes up for that.

use std::ffi::{OsStr, OsString};
use std::fmt::{self, Write as _};
use std::fs::File;
use std::io::{Read as _, Seek as _};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context;
use process_wrap::std::{ChildWrapper, CommandWrap};

/// How often a running child is looked at. It delays the end of each step by
/// half of this on average, and costs one system call each time.
const POLL: Duration = Duration::from_millis(20);

/// How long a killed child may take to be gone. One that sits in the kernel
/// (a driver that hangs, say) may never go, and must not hang us too.
const GRACE: Duration = Duration::from_secs(10);

/// The exit code of coreutils' `timeout`, which CI systems know.
const TIMED_OUT_CODE: u8 = 124;
/// What a shell reports of a child that SIGINT ended.
const INTERRUPTED_CODE: u8 = 130;

/// A child process to run, under a name.
#[derive(Clone, Debug)]
pub struct Step {
    name: String,
    program: OsString,
    args: Vec<OsString>,
    /// In order; `None` removes the variable.
    env: Vec<(OsString, Option<OsString>)>,
    /// Where to run, if not where the runner runs everything else.
    dir: Option<PathBuf>,
}

impl Step {
    pub fn new(name: impl Into<String>, program: impl Into<OsString>) -> Self {
        Self {
            name: name.into(),
            program: program.into(),
            args: Vec::new(),
            env: Vec::new(),
            dir: None,
        }
    }

    /// A step that runs the cargo which runs us, so that a toolchain chosen
    /// with `cargo +version` stays the chosen one.
    pub fn cargo(name: impl Into<String>) -> Self {
        Self::new(
            name,
            std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()),
        )
    }

    pub fn arg(mut self, arg: impl Into<OsString>) -> Self {
        self.args.push(arg.into());
        self
    }

    pub fn args<A: Into<OsString>>(mut self, args: impl IntoIterator<Item = A>) -> Self {
        self.args.extend(args.into_iter().map(Into::into));
        self
    }

    pub fn env(mut self, key: impl Into<OsString>, value: impl Into<OsString>) -> Self {
        self.env.push((key.into(), Some(value.into())));
        self
    }

    pub fn env_remove(mut self, key: impl Into<OsString>) -> Self {
        self.env.push((key.into(), None));
        self
    }

    pub fn in_dir(mut self, dir: impl Into<PathBuf>) -> Self {
        self.dir = Some(dir.into());
        self
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// The command as one would type it; the program without its directory.
    pub fn command_line(&self) -> String {
        let mut line = String::new();
        for (key, value) in &self.env {
            if let Some(value) = value {
                let _ = write!(line, "{}={} ", key.to_string_lossy(), quote(value));
            }
        }
        let program = Path::new(&self.program)
            .file_stem()
            .unwrap_or(&self.program);
        line.push_str(&quote(program));
        for arg in &self.args {
            line.push(' ');
            line.push_str(&quote(arg));
        }
        line
    }
}

/// Quotes `word` for a POSIX shell where it needs that.
pub fn quote(word: &OsStr) -> String {
    let word = word.to_string_lossy();
    let plain = |c: char| c.is_ascii_alphanumeric() || "_-+=./,:@%".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        word.into_owned()
    } else {
        format!("'{}'", word.replace('\'', r"'\''"))
    }
}

/// How a child ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    Exited(ExitStatus),
    TimedOut { limit: Duration },
    Interrupted,
}

impl Outcome {
    /// The code to exit with in order to pass this outcome on.
    pub fn exit_code(self) -> u8 {
        match self {
            Self::Exited(status) => exit_code(status),
            Self::TimedOut { .. } => TIMED_OUT_CODE,
            Self::Interrupted => INTERRUPTED_CODE,
        }
    }

    pub fn is_success(self) -> bool {
        matches!(self, Self::Exited(status) if status.success())
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exited(status) if status.success() => f.write_str("ok"),
            Self::Exited(status) => match status.code() {
                Some(code) => write!(f, "exit code {code}"),
                // `ExitStatus` names the signal.
                None => write!(f, "{status}"),
            },
            Self::TimedOut { limit } => {
                write!(f, "killed at its limit of {}", Seconds(*limit))
            }
            Self::Interrupted => f.write_str("interrupted"),
        }
    }
}

fn exit_code(status: ExitStatus) -> u8 {
    #[cfg(unix)]
    if let Some(signal) = std::os::unix::process::ExitStatusExt::signal(&status) {
        // As a shell reports it.
        return u8::try_from(128 + signal).unwrap_or(u8::MAX);
    }
    match status.code() {
        // Windows has codes past 255 (access violation and the like): they
        // must not wrap round to 0.
        Some(code) => u8::try_from(code).unwrap_or(u8::MAX),
        None => u8::MAX,
    }
}

/// A step that did not succeed.
#[derive(Debug)]
pub struct StepError {
    name: String,
    command_line: String,
    outcome: Outcome,
}

impl StepError {
    pub fn new(step: &Step, outcome: Outcome) -> Self {
        Self {
            name: step.name.clone(),
            command_line: step.command_line(),
            outcome,
        }
    }

    pub fn exit_code(&self) -> u8 {
        self.outcome.exit_code()
    }
}

impl fmt::Display for StepError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            name,
            command_line,
            outcome,
        } = self;
        match outcome {
            Outcome::Exited(_) => write!(
                f,
                "step `{name}` failed: `{command_line}` ended with {outcome}, expected exit code 0"
            ),
            Outcome::TimedOut { limit } => write!(
                f,
                "step `{name}` hung: `{command_line}` was still running at its limit of {} \
                 and was killed with all it had started",
                Seconds(*limit)
            ),
            Outcome::Interrupted => write!(f, "step `{name}` was interrupted: `{command_line}`"),
        }
    }
}

impl std::error::Error for StepError {}

/// A step that has been run.
#[derive(Clone, Debug)]
pub struct Record {
    pub name: String,
    pub outcome: Outcome,
    pub elapsed: Duration,
}

/// Runs steps and remembers how each one went.
pub struct Runner {
    limit: Duration,
    interrupted: Arc<AtomicBool>,
    dir: PathBuf,
    env: Vec<(OsString, OsString)>,
    records: Vec<Record>,
}

impl Runner {
    /// Steps run in `dir`, each for at most `limit`, and until `interrupted`.
    pub fn new(limit: Duration, interrupted: Arc<AtomicBool>, dir: impl Into<PathBuf>) -> Self {
        Self {
            limit,
            interrupted,
            dir: dir.into(),
            env: Vec::new(),
            records: Vec::new(),
        }
    }

    /// Sets a variable for every child.
    pub fn set_env(&mut self, key: impl Into<OsString>, value: impl Into<OsString>) {
        self.env.push((key.into(), value.into()));
    }

    pub fn limit(&self) -> Duration {
        self.limit
    }

    pub fn records(&self) -> &[Record] {
        &self.records
    }

    /// Runs `step` with our own output streams, and reports how it ended.
    pub fn run(&mut self, step: &Step) -> anyhow::Result<Outcome> {
        // Our own words go to stderr: stdout carries the children's output
        // alone, which other programs read.
        eprintln!("\n==> {}: {}", step.name, step.command_line());
        let (outcome, elapsed) = self.execute(step, Stdio::inherit(), Stdio::inherit())?;
        eprintln!("==> {}: {outcome} after {}", step.name, Seconds(elapsed));
        self.records.push(Record {
            name: step.name.clone(),
            outcome,
            elapsed,
        });
        Ok(outcome)
    }

    /// Runs `step` and fails unless it succeeds.
    pub fn require(&mut self, step: &Step) -> anyhow::Result<()> {
        let outcome = self.run(step)?;
        if outcome.is_success() {
            Ok(())
        } else {
            Err(StepError::new(step, outcome).into())
        }
    }

    /// Runs a query quietly; returns how it ended and what it wrote to stdout.
    pub fn capture(&self, step: &Step) -> anyhow::Result<(Outcome, String)> {
        // A file, not a pipe: nothing has to drain it while the child runs,
        // and a grandchild that keeps it open cannot block the reading.
        let mut file = tempfile::tempfile().context("cannot create a temporary file")?;
        let stdout = file
            .try_clone()
            .context("cannot duplicate the handle of a temporary file")?;
        // These answers are parsed, so they must not be translated.
        let step = step.clone().env("LC_ALL", "C");
        // A query's complaint (a package that dpkg does not know, a password
        // that sudo would ask for) is an answer too, and its exit code says it.
        let (outcome, _) = self.execute(&step, stdout.into(), Stdio::null())?;
        let text = read_from_start(&mut file)
            .with_context(|| format!("cannot read what `{}` wrote", step.command_line()))?;
        Ok((outcome, text))
    }

    /// Runs `step` quietly as one of the recorded steps; returns all that it wrote.
    pub fn transcript(&mut self, step: &Step) -> anyhow::Result<(Outcome, String)> {
        eprintln!("\n==> {}: {}", step.name, step.command_line());
        let mut file = tempfile::tempfile().context("cannot create a temporary file")?;
        let duplicate = || {
            file.try_clone()
                .context("cannot duplicate the handle of a temporary file")
        };
        let (outcome, elapsed) = self.execute(step, duplicate()?.into(), duplicate()?.into())?;
        eprintln!("==> {}: {outcome} after {}", step.name, Seconds(elapsed));
        self.records.push(Record {
            name: step.name.clone(),
            outcome,
            elapsed,
        });
        let text = read_from_start(&mut file)
            .with_context(|| format!("cannot read what `{}` wrote", step.command_line()))?;
        Ok((outcome, text))
    }

    fn execute(
        &self,
        step: &Step,
        stdout: Stdio,
        stderr: Stdio,
    ) -> anyhow::Result<(Outcome, Duration)> {
        let start = Instant::now();
        if self.interrupted.load(Ordering::Relaxed) {
            return Ok((Outcome::Interrupted, Duration::ZERO));
        }
        let dir = step.dir.as_deref().unwrap_or(&self.dir);
        let mut command = Command::new(&step.program);
        command
            .args(&step.args)
            .current_dir(dir)
            .envs(self.env.iter().map(|(key, value)| (key, value)))
            // A child that asked a question would wait for ever.
            .stdin(Stdio::null())
            .stdout(stdout)
            .stderr(stderr);
        for (key, value) in &step.env {
            match value {
                Some(value) => command.env(key, value),
                None => command.env_remove(key),
            };
        }
        let mut command = CommandWrap::from(command);
        #[cfg(unix)]
        command.wrap(process_wrap::std::ProcessGroup::leader());
        #[cfg(windows)]
        command.wrap(process_wrap::std::JobObject);
        let mut child = command.spawn().with_context(|| {
            format!(
                "step `{}` could not start `{}` in {}",
                step.name,
                step.program.to_string_lossy(),
                dir.display()
            )
        })?;
        let outcome = self
            .wait(child.as_mut(), start)
            .with_context(|| format!("step `{}`: `{}`", step.name, step.command_line()))?;
        Ok((outcome, start.elapsed()))
    }

    fn wait(&self, child: &mut dyn ChildWrapper, start: Instant) -> anyhow::Result<Outcome> {
        loop {
            if let Some(status) = child.try_wait().context("cannot wait for the child")? {
                return Ok(Outcome::Exited(status));
            }
            if self.interrupted.load(Ordering::Relaxed) {
                kill(child)?;
                return Ok(Outcome::Interrupted);
            }
            if start.elapsed() >= self.limit {
                kill(child)?;
                return Ok(Outcome::TimedOut { limit: self.limit });
            }
            thread::sleep(POLL);
        }
    }
}

/// Kills `child` and all that it started.
fn kill(child: &mut dyn ChildWrapper) -> anyhow::Result<()> {
    let id = child.id();
    child
        .start_kill()
        .with_context(|| format!("cannot kill process group {id}, which is still running"))?;
    let start = Instant::now();
    while start.elapsed() < GRACE {
        if child
            .try_wait()
            .context("cannot wait for the killed child")?
            .is_some()
        {
            return Ok(());
        }
        thread::sleep(POLL);
    }
    anyhow::bail!(
        "process {id} is still there {} after it was killed",
        Seconds(GRACE)
    )
}

fn read_from_start(file: &mut File) -> std::io::Result<String> {
    file.rewind()?;
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// Returns a flag that is set once we are asked to stop (Ctrl-C, SIGTERM or
/// SIGHUP). The running child is then killed and we leave in an orderly way.
pub fn watch_for_interrupts() -> anyhow::Result<Arc<AtomicBool>> {
    let flag = Arc::new(AtomicBool::new(false));
    let handle = Arc::clone(&flag);
    ctrlc::set_handler(move || handle.store(true, Ordering::Relaxed))
        .context("cannot install a handler for Ctrl-C")?;
    Ok(flag)
}

/// A duration in seconds, and in minutes where that reads better.
struct Seconds(Duration);

impl fmt::Display for Seconds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Rounded to tenths first, lest 59.96 s become "60.0 s".
        let tenths = (self.0.as_millis() + 50) / 100;
        let text = if tenths < 600 {
            format!("{}.{} s", tenths / 10, tenths % 10)
        } else {
            format!("{} min {:02} s", tenths / 600, tenths % 600 / 10)
        };
        f.pad(&text)
    }
}

/// The closing table: what ran, then what of `planned` did not.
pub fn table(records: &[Record], planned: &[&str]) -> String {
    let unrun = planned
        .iter()
        .filter(|name| records.iter().all(|record| record.name != **name));
    let total: Duration = records.iter().map(|record| record.elapsed).sum();
    let mut rows: Vec<(&str, String, String)> = records
        .iter()
        .map(|record| {
            (
                record.name.as_str(),
                Seconds(record.elapsed).to_string(),
                record.outcome.to_string(),
            )
        })
        .collect();
    rows.extend(unrun.map(|name| (*name, "-".to_owned(), "not run".to_owned())));
    rows.push(("total", Seconds(total).to_string(), String::new()));

    let width = |column: fn(&(&str, String, String)) -> usize, heading: &str| {
        rows.iter()
            .map(column)
            .fold(heading.len(), std::cmp::Ord::max)
    };
    let name_width = width(|row| row.0.chars().count(), "step");
    let time_width = width(|row| row.1.chars().count(), "time");
    let mut text = format!("{:name_width$}  {:>time_width$}  result\n", "step", "time");
    for (name, time, result) in &rows {
        let line = format!("{name:name_width$}  {time:>time_width$}  {result}");
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quotes_only_what_a_shell_would_split_or_expand() {
        assert_eq!(quote("--cases=5".as_ref()), "--cases=5");
        assert_eq!(quote("-D warnings".as_ref()), "'-D warnings'");
        assert_eq!(quote("it's".as_ref()), r"'it'\''s'");
        assert_eq!(quote("".as_ref()), "''");
        assert_eq!(quote("${Package}".as_ref()), "'${Package}'");
    }

    #[test]
    fn shows_the_environment_a_step_sets() {
        let step = Step::new("doc", "/usr/bin/cargo")
            .args(["doc", "--no-deps"])
            .env("RUSTDOCFLAGS", "-D warnings")
            .env_remove("VK_DRIVER_FILES");
        assert_eq!(
            step.command_line(),
            "RUSTDOCFLAGS='-D warnings' cargo doc --no-deps"
        );
    }

    #[test]
    fn durations_read_in_seconds_then_minutes() {
        let text = |millis| Seconds(Duration::from_millis(millis)).to_string();
        assert_eq!(text(1_240), "1.2 s");
        assert_eq!(text(59_940), "59.9 s");
        assert_eq!(text(59_960), "1 min 00 s");
        assert_eq!(text(2_400_000), "40 min 00 s");
    }

    // The rest starts real children, with a POSIX shell.
    #[cfg(unix)]
    mod children {
        use super::*;
        use std::sync::mpsc;

        const LONG: Duration = Duration::from_secs(60);

        fn runner(limit: Duration) -> Runner {
            Runner::new(limit, Arc::default(), std::env::temp_dir())
        }

        fn shell(script: &str) -> Step {
            Step::new("probe", "sh").args(["-c", script])
        }

        fn ended_with(script: &str) -> Outcome {
            runner(LONG).capture(&shell(script)).unwrap().0
        }

        #[test]
        fn passes_exit_codes_and_signals_on() {
            assert!(ended_with("exit 0").is_success());
            assert_eq!(ended_with("exit 0").exit_code(), 0);
            assert_eq!(ended_with("exit 3").exit_code(), 3);
            assert!(!ended_with("exit 3").is_success());
            assert_eq!(ended_with("kill -TERM $$").exit_code(), 128 + 15);
        }

        #[test]
        fn captures_output_with_the_environment_of_runner_and_step() {
            let mut runner = runner(LONG);
            runner.set_env("FROM_RUNNER", "one");
            runner.set_env("TAKEN_AWAY", "three");
            let step = shell("echo $FROM_RUNNER $FROM_STEP ${TAKEN_AWAY-gone} $LC_ALL")
                .env("FROM_STEP", "two")
                .env_remove("TAKEN_AWAY");
            let (outcome, text) = runner.capture(&step).unwrap();
            assert!(outcome.is_success());
            assert_eq!(text, "one two gone C\n");
        }

        #[test]
        fn a_child_cannot_read_from_the_terminal() {
            let (outcome, text) = runner(LONG).capture(&shell("cat; echo end")).unwrap();
            assert!(outcome.is_success());
            assert_eq!(text, "end\n");
        }

        /// Starts a shell that waits for a grandchild, and returns how that
        /// ended together with what both wrote. Reading ends only when no
        /// process holds the pipe any more: neither child nor grandchild.
        fn run_with_grandchild(runner: &Runner) -> (Outcome, String) {
            let (mut reader, writer) = std::io::pipe().unwrap();
            let (sender, receiver) = mpsc::channel();
            thread::spawn(move || {
                let mut text = String::new();
                let read = reader.read_to_string(&mut text);
                sender.send(read.map(|_| text))
            });
            let step = shell("(echo grandchild; sleep 300) & echo child; wait");
            let (outcome, elapsed) = runner.execute(&step, writer.into(), Stdio::null()).unwrap();
            assert!(
                elapsed < LONG,
                "the child outlived its limit by {elapsed:?}"
            );
            let text = receiver
                .recv_timeout(GRACE)
                .expect("a process outlived the killing of its group")
                .unwrap();
            (outcome, text)
        }

        #[test]
        fn a_child_that_outlasts_its_limit_dies_with_its_grandchildren() {
            let limit = Duration::from_secs(2);
            let (outcome, text) = run_with_grandchild(&runner(limit));
            assert_eq!(outcome, Outcome::TimedOut { limit });
            assert_eq!(outcome.exit_code(), 124);
            assert!(text.contains("grandchild\n"), "never started: {text:?}");
            let error = StepError::new(&shell("x"), outcome).to_string();
            assert!(error.contains("step `probe` hung"), "{error}");
            assert!(error.contains("limit of 2.0 s"), "{error}");
        }

        #[test]
        fn an_interrupt_kills_the_child_with_its_grandchildren() {
            let runner = runner(LONG);
            let flag = Arc::clone(&runner.interrupted);
            thread::spawn(move || {
                thread::sleep(Duration::from_secs(1));
                flag.store(true, Ordering::Relaxed);
            });
            let (outcome, _) = run_with_grandchild(&runner);
            assert_eq!(outcome, Outcome::Interrupted);
            assert_eq!(outcome.exit_code(), 130);
        }

        #[test]
        fn after_an_interrupt_no_further_child_starts() {
            let runner = runner(LONG);
            runner.interrupted.store(true, Ordering::Relaxed);
            let (outcome, text) = runner.capture(&shell("echo started")).unwrap();
            assert_eq!(outcome, Outcome::Interrupted);
            assert_eq!(text, "");
        }

        #[test]
        fn a_program_that_is_missing_is_named() {
            let step = Step::new("probe", "no-such-program-here");
            let error = runner(LONG).capture(&step).unwrap_err();
            let text = format!("{error:#}");
            assert!(text.contains("step `probe`"), "{text}");
            assert!(text.contains("`no-such-program-here`"), "{text}");
        }

        #[test]
        fn a_failure_names_step_command_and_code() {
            let mut runner = runner(LONG);
            let error = runner.require(&shell("exit 7")).unwrap_err();
            assert_eq!(
                error.to_string(),
                "step `probe` failed: `sh -c 'exit 7'` ended with exit code 7, expected exit code 0"
            );
            let error = error.downcast_ref::<StepError>().unwrap();
            assert_eq!(error.exit_code(), 7);
            assert_eq!(runner.records().len(), 1);
        }

        #[test]
        fn the_table_lists_what_ran_and_what_did_not() {
            let record = |name: &str, script, millis| Record {
                name: name.to_owned(),
                outcome: ended_with(script),
                elapsed: Duration::from_millis(millis),
            };
            let records = [
                record("fmt", "exit 0", 800),
                record("clippy", "exit 101", 61_000),
            ];
            assert_eq!(
                table(&records, &["fmt", "clippy", "test"]),
                "step          time  result\n\
                 fmt          0.8 s  ok\n\
                 clippy  1 min 01 s  exit code 101\n\
                 test             -  not run\n\
                 total   1 min 01 s\n"
            );
        }
    }
}
