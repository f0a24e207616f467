//! Foreign code in a process group of its own, with limits. However it ends, and whoever stops waiting for it, the whole
//! group is killed.

use std::io;
use std::ops::ControlFlow;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process_group};
use thiserror::Error;
use tokio::io::{AsyncBufRead, AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::process::Command;
use tokio::time::{Instant, sleep, sleep_until};

/// How often memory is looked at.
const LOOK: Duration = Duration::from_millis(200);
/// More of one line is left out.
const LONGEST_LINE: usize = 1 << 20;
/// More of a child's output is left out.
pub const LONGEST_OUTPUT: u64 = 32 << 20;

/// What a child may take.
#[derive(Debug, Clone, Copy)]
pub struct Bounds {
    /// Until when.
    pub until: Instant,
    /// Bytes of memory of the whole group.
    pub memory: u64,
}

/// How a child ended that was not stopped.
#[derive(Debug)]
pub struct Ended {
    /// Whether it says that all is well.
    pub success: bool,
    /// What it wrote.
    pub output: Vec<u8>,
}

/// Why a child did not come to its end.
#[derive(Debug, Error)]
pub enum ChildError {
    /// It is not there, for one.
    #[error(
        "{program} cannot be started: install it, or set HARMONIA_CI_NIX_BIN to the directory that has Nix's programs"
    )]
    Start {
        /// The program.
        program: String,
        /// Why.
        source: io::Error,
    },
    /// It took too long.
    #[error("it took too long")]
    Time,
    /// It took too much.
    #[error("it took {0} bytes of memory")]
    Memory(u64),
    /// Whoever listens has heard enough.
    #[error("it was stopped")]
    Stopped,
    /// Its pipes broke.
    #[error("it cannot be listened to")]
    Pipe(#[from] io::Error),
}

/// Runs a program to its end. Each line of its errors goes to `line`, which may stop it.
pub async fn run(
    mut command: Command,
    input: &[u8],
    bounds: Bounds,
    line: impl FnMut(&str) -> ControlFlow<()>,
) -> Result<Ended, ChildError> {
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let program = command.as_std().get_program().to_string_lossy().into_owned();
    let spawned = command.process_group(0).kill_on_drop(true).spawn();
    let mut child = spawned.map_err(|source| ChildError::Start { program, source })?;
    let group = Group(child.id().and_then(|id| Pid::from_raw(i32::try_from(id).ok()?)));
    let pipes = (child.stdin.take(), child.stdout.take(), child.stderr.take());
    let (Some(mut stdin), Some(stdout), Some(stderr)) = pipes else {
        return Err(io::Error::other("a pipe is missing").into());
    };
    let work = async {
        let feed = async move {
            // A child that fails early reads nothing: what it says about it is worth more than the broken pipe.
            let _ = stdin.write_all(input).await;
            Ok(())
        };
        let output = async {
            let mut output = Vec::new();
            stdout.take(LONGEST_OUTPUT).read_to_end(&mut output).await?;
            Ok(output)
        };
        let ((), output, ()) = tokio::try_join!(feed, output, listen(BufReader::new(stderr), line))?;
        Ok(Ended { success: child.wait().await?.success(), output })
    };
    tokio::select! {
        ended = work => ended,
        () = sleep_until(bounds.until) => Err(ChildError::Time),
        bytes = exceeds(&group, bounds.memory) => Err(ChildError::Memory(bytes)),
    }
}

async fn listen(
    mut errors: impl AsyncBufRead + Unpin,
    mut line: impl FnMut(&str) -> ControlFlow<()>,
) -> Result<(), ChildError> {
    let mut heard = Vec::new();
    loop {
        let bytes = errors.fill_buf().await?;
        let end = bytes.iter().position(|byte| *byte == b'\n');
        let (count, whole) = (end.unwrap_or(bytes.len()), end.is_some() || bytes.is_empty());
        heard.extend_from_slice(&bytes[..count.min(LONGEST_LINE.saturating_sub(heard.len()))]);
        let is_over = bytes.is_empty();
        errors.consume(count + usize::from(end.is_some()));
        if whole && !(is_over && heard.is_empty()) && line(&String::from_utf8_lossy(&heard)).is_break() {
            return Err(ChildError::Stopped);
        }
        if is_over {
            return Ok(());
        }
        if whole {
            heard.clear();
        }
    }
}

/// A group of processes that ends with this.
struct Group(Option<Pid>);

impl Drop for Group {
    fn drop(&mut self) {
        if let Some(group) = self.0 {
            // It may have ended by itself.
            let _ = kill_process_group(group, Signal::KILL);
        }
    }
}

/// Ends when the group has more memory than it may.
async fn exceeds(group: &Group, most: u64) -> u64 {
    loop {
        sleep(LOOK).await;
        let bytes = group.0.map_or(0, memory_of);
        if bytes > most {
            return bytes;
        }
    }
}

fn memory_of(group: Pid) -> u64 {
    let group = group.as_raw_nonzero().get().to_string();
    let processes = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let numbered = processes
        .filter(|entry| entry.file_name().as_encoded_bytes().first().is_some_and(u8::is_ascii_digit));
    numbered.filter_map(|entry| resident(&entry.path(), &group)).sum::<u64>()
        * rustix::param::page_size() as u64
}

/// Pages in memory of a process, if it belongs to the group.
fn resident(process: &Path, group: &str) -> Option<u64> {
    let stat = std::fs::read_to_string(process.join("stat")).ok()?;
    // A program's name may have anything in it but ends with the last parenthesis. Then follow the state, the parent, the group,
    // and 18 fields later the pages.
    let fields = stat.rsplit_once(") ")?.1;
    let mut fields = fields.split(' ');
    (fields.nth(2)? == group).then(|| fields.nth(18)?.parse().ok()).flatten()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    fn bounds(seconds: u64, memory: u64) -> Bounds {
        Bounds { until: Instant::now() + Duration::from_secs(seconds), memory }
    }

    #[tokio::test]
    async fn a_child_is_heard_to_its_last_line() {
        let mut lines = Vec::new();
        let script = "cat; printf 'one\\n\\ntwo' >&2; exit 3";
        let ended = run(shell(script), b"input", bounds(60, u64::MAX), |line| {
            lines.push(line.to_owned());
            ControlFlow::Continue(())
        });
        let ended = ended.await.unwrap();
        assert_eq!(
            (ended.success, ended.output.as_slice(), lines),
            (false, &b"input"[..], vec!["one".into(), String::new(), "two".into()])
        );
    }

    #[tokio::test]
    async fn what_takes_too_long_is_killed_with_its_children() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("pid");
        let script = format!("sh -c 'echo $$ >{}; exec sleep 1000' & wait", file.display());
        let ended = run(shell(&script), b"", bounds(1, u64::MAX), |_| ControlFlow::Continue(())).await;
        assert!(matches!(ended, Err(ChildError::Time)));
        let pid = std::fs::read_to_string(file).unwrap();
        let status = || std::fs::read_to_string(format!("/proc/{}/stat", pid.trim())).unwrap_or_default();
        for _ in 0..500 {
            if status().is_empty() || status().contains(") Z ") {
                return;
            }
            sleep(Duration::from_millis(10)).await;
        }
        panic!("it runs: {}", status());
    }

    #[tokio::test]
    async fn what_takes_too_much_memory_is_killed() {
        let ended = run(shell("sleep 1000"), b"", bounds(60, 1000), |_| ControlFlow::Continue(())).await;
        assert!(matches!(ended, Err(ChildError::Memory(bytes)) if bytes > 1000));
    }

    #[tokio::test]
    async fn whoever_has_heard_enough_stops_it() {
        let ended =
            run(shell("echo x >&2; sleep 1000"), b"", bounds(60, u64::MAX), |_| ControlFlow::Break(())).await;
        assert!(matches!(ended, Err(ChildError::Stopped)));
    }
}
