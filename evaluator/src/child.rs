//! Foreign code in processes of its own, with limits. However it ends, and whoever stops waiting for it, all that descends from
//! it is killed.

use std::collections::HashMap;
use std::io;
use std::ops::ControlFlow;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process, kill_process_group};
use thiserror::Error;
use tokio::io::{AsyncBufRead, AsyncBufReadExt, AsyncRead, AsyncReadExt, AsyncWriteExt, BufReader};
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
    /// Bytes of memory of all its processes.
    pub memory: u64,
}

/// Where a child says line by line what counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Heard {
    /// Nix's traces, and whatever programs complain about.
    Errors,
    /// Its output.
    Output,
}

/// How a child ended that was not stopped.
#[derive(Debug)]
pub struct Ended {
    /// Whether it says that all is well.
    pub success: bool,
    /// What it wrote where its lines are not heard.
    pub rest: Vec<u8>,
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

/// Runs a program to its end. Each line that is heard goes to `line`, which may stop it.
pub async fn run(
    mut command: Command,
    input: &[u8],
    bounds: Bounds,
    heard: Heard,
    line: impl FnMut(&str) -> ControlFlow<()>,
) -> Result<Ended, ChildError> {
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let program = command.as_std().get_program().to_string_lossy().into_owned();
    let spawned = command.process_group(0).kill_on_drop(true).spawn();
    let mut child = spawned.map_err(|source| ChildError::Start { program, source })?;
    let tree = Tree(child.id().and_then(|id| Pid::from_raw(i32::try_from(id).ok()?)));
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
        let (lines, rest): (Box<dyn AsyncRead + Send + Unpin>, Box<dyn AsyncRead + Send + Unpin>) =
            match heard {
                Heard::Errors => (Box::new(stderr), Box::new(stdout)),
                Heard::Output => (Box::new(stdout), Box::new(stderr)),
            };
        let read = async {
            let mut read = Vec::new();
            rest.take(LONGEST_OUTPUT).read_to_end(&mut read).await?;
            Ok(read)
        };
        let ((), rest, ()) = tokio::try_join!(feed, read, listen(BufReader::new(lines), line))?;
        Ok(Ended { success: child.wait().await?.success(), rest })
    };
    tokio::select! {
        ended = work => ended,
        () = sleep_until(bounds.until) => Err(ChildError::Time),
        bytes = exceeds(&tree, bounds.memory) => Err(ChildError::Memory(bytes)),
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

/// A process with all that descend from it, whatever groups and sessions those made for themselves. They end with this.
struct Tree(Option<Pid>);

impl Drop for Tree {
    fn drop(&mut self) {
        let Some(root) = self.0 else { return };
        // Found before their parents are gone. Any of them may have ended by itself.
        let members = members(root);
        let _ = kill_process_group(root, Signal::KILL);
        for (id, _) in members {
            let _ = kill_process(id, Signal::KILL);
        }
    }
}

/// Ends when the tree has more memory than it may.
async fn exceeds(tree: &Tree, most: u64) -> u64 {
    loop {
        sleep(LOOK).await;
        let pages: u64 = tree.0.map_or(0, |root| members(root).iter().map(|(_, pages)| pages).sum());
        let bytes = pages * rustix::param::page_size() as u64;
        if bytes > most {
            return bytes;
        }
    }
}

struct Process {
    parent: i32,
    group: i32,
    /// In memory.
    pages: u64,
}

/// The processes of the tree, with their pages.
fn members(root: Pid) -> Vec<(Pid, u64)> {
    let root = root.as_raw_nonzero().get();
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let all: HashMap<i32, Process> = entries
        .filter_map(|entry| Some((entry.file_name().to_str()?.parse().ok()?, process(&entry.path())?)))
        .collect();
    let belongs = |id: i32| {
        let ancestors = std::iter::successors(Some(id), |id| Some(all.get(id)?.parent));
        // No chain is longer than there are processes, unless one ended and another took its number meanwhile.
        let mut ancestors = ancestors.take(all.len());
        ancestors.any(|id| id == root || all.get(&id).is_some_and(|process| process.group == root))
    };
    let members = all.iter().filter(|(id, _)| belongs(**id));
    members.filter_map(|(id, process)| Some((Pid::from_raw(*id)?, process.pages))).collect()
}

fn process(directory: &Path) -> Option<Process> {
    let stat = std::fs::read_to_string(directory.join("stat")).ok()?;
    // A program's name may have anything in it but ends with the last parenthesis. Then follow the state, the parent, the group,
    // and 18 fields later the pages.
    let mut fields = stat.rsplit_once(") ")?.1.split(' ');
    let (parent, group) = (fields.nth(1)?.parse().ok()?, fields.next()?.parse().ok()?);
    Some(Process { parent, group, pages: fields.nth(18)?.parse().ok()? })
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
        let ended = run(shell(script), b"input", bounds(60, u64::MAX), Heard::Errors, |line| {
            lines.push(line.to_owned());
            ControlFlow::Continue(())
        });
        let ended = ended.await.unwrap();
        assert_eq!(
            (ended.success, ended.rest.as_slice(), lines),
            (false, &b"input"[..], vec!["one".into(), String::new(), "two".into()])
        );
    }

    #[tokio::test]
    async fn what_takes_too_long_is_killed_with_its_children() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("pid");
        let script = format!("sh -c 'echo $$ >{}; exec sleep 1000' & wait", file.display());
        let ended =
            run(shell(&script), b"", bounds(1, u64::MAX), Heard::Errors, |_| ControlFlow::Continue(())).await;
        assert!(matches!(ended, Err(ChildError::Time)));
        ends(&file).await;
    }

    /// Waits until the processes are gone whose numbers are in a file.
    async fn ends(file: &Path) {
        let status = |pid: &str| std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        for pid in std::fs::read_to_string(file).unwrap().lines() {
            let gone = || status(pid).is_empty() || status(pid).contains(") Z ");
            for _ in 0..3000 {
                if gone() {
                    break;
                }
                sleep(Duration::from_millis(10)).await;
            }
            assert!(gone(), "it runs: {}", status(pid));
        }
    }

    #[tokio::test]
    async fn memory_is_counted_over_all_processes_and_all_of_them_are_killed() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("pids");
        // Each takes less than there may be, and leaves the group.
        let one = format!("echo $$ >>{}; exec perl -e '$x = \"x\" x (50 << 20); sleep 1000'", file.display());
        let script =
            format!("for i in 1 2 3 4; do setsid sh -c '{}' & done; wait", one.replace('\'', "'\\''"));
        let ended =
            run(shell(&script), b"", bounds(60, 120 << 20), Heard::Errors, |_| ControlFlow::Continue(()))
                .await;
        assert!(matches!(ended, Err(ChildError::Memory(bytes)) if bytes > 120 << 20), "{ended:?}");
        ends(&file).await;
    }

    #[tokio::test]
    async fn what_takes_too_much_memory_is_killed() {
        let ended =
            run(shell("sleep 1000"), b"", bounds(60, 1000), Heard::Errors, |_| ControlFlow::Continue(()))
                .await;
        assert!(matches!(ended, Err(ChildError::Memory(bytes)) if bytes > 1000));
    }

    #[tokio::test]
    async fn whoever_has_heard_enough_stops_it() {
        let ended = run(shell("echo x >&2; sleep 1000"), b"", bounds(60, u64::MAX), Heard::Errors, |_| {
            ControlFlow::Break(())
        })
        .await;
        assert!(matches!(ended, Err(ChildError::Stopped)));
    }
}
