//! Parts of the farm, each a process that is started again when it ends.

use std::ffi::OsString;
use std::io;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use harmonia_service::supervised;
use rustix::process::{Pid, Signal, kill_process};
use tokio::process::{Child, ChildStderr, ChildStdout};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout};

use super::layout::Layout;
use super::terminal::{LogFile, Terminal};

/// The first pause before a part is started again; each one is twice as long as the one before,
const FIRST_PAUSE: Duration = Duration::from_millis(200);
/// up to this.
const LONGEST_PAUSE: Duration = Duration::from_secs(30);
/// Who lived for so long begins with the first pause again.
const GOOD_LIFE: Duration = Duration::from_secs(60);
/// How long what a part wrote is read after its end.
const LAST_WORDS: Duration = Duration::from_millis(200);

/// A part, and how it is started, stopped and made to end with this process.
pub struct Program {
    pub name: &'static str,
    /// Asked at every start.
    pub command: Box<dyn Fn() -> Command + Send + Sync>,
    pub kind: Kind,
}

/// Whose program it is.
#[derive(Debug, Clone, Copy)]
pub enum Kind {
    /// A role of ours: it watches its standard input.
    Role,
    /// Somebody else's, stopped by this signal: a shell watches for it.
    Foreign(Signal),
}

/// What a part is at.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum State {
    Runs,
    /// It ended so many times in short succession, the last time so.
    Failed(u32, String),
    Stopped,
}

enum Order {
    Stop,
    Kill,
}

struct Running {
    name: &'static str,
    orders: mpsc::UnboundedSender<Order>,
    state: watch::Receiver<State>,
}

/// All parts that were started.
pub struct Supervisor {
    terminal: Arc<Terminal>,
    variables: Arc<[(&'static str, OsString)]>,
    running: Mutex<Vec<Running>>,
}

impl Supervisor {
    /// Each part has these variables in its environment.
    pub fn new(terminal: Arc<Terminal>, variables: Vec<(&'static str, OsString)>) -> Self {
        Self { terminal, variables: variables.into(), running: Mutex::default() }
    }

    /// Starts a part and keeps it running.
    pub fn start(&self, layout: &Layout, program: Program) {
        let (orders, received) = mpsc::unbounded_channel();
        let (say, state) = watch::channel(State::Runs);
        self.running().push(Running { name: program.name, orders, state });
        let log = Arc::new(Mutex::new(LogFile::new(layout.log(program.name))));
        let (terminal, variables) = (self.terminal.clone(), self.variables.clone());
        let keeper = Keeper { program, terminal, variables, log, say };
        tokio::spawn(keeper.keep(received));
    }

    /// How each of them is.
    pub fn states(&self) -> Vec<(&'static str, State)> {
        self.running().iter().map(|part| (part.name, part.state.borrow().clone())).collect()
    }

    /// Tells a part to stop; a second time, to hurry.
    pub fn stop(&self, name: &str) {
        self.order(name, || Order::Stop);
    }

    /// Ends it there and then.
    pub fn kill(&self, name: &str) {
        self.order(name, || Order::Kill);
    }

    /// Waits until a part that was told to stop has.
    pub async fn stopped(&self, name: &str) {
        let state = self.running().iter().find(|part| part.name == name).map(|part| part.state.clone());
        if let Some(mut state) = state {
            // An error: its keeper is gone, and so is the part.
            let _ = state.wait_for(|state| *state == State::Stopped).await;
        }
    }

    fn order(&self, name: &str, order: impl Fn() -> Order) {
        for part in self.running().iter().filter(|part| part.name == name) {
            // One that has stopped takes no more orders.
            let _ = part.orders.send(order());
        }
    }

    fn running(&self) -> MutexGuard<'_, Vec<Running>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

enum Output {
    Out(ChildStdout),
    Err(ChildStderr),
}

struct Keeper {
    program: Program,
    terminal: Arc<Terminal>,
    variables: Arc<[(&'static str, OsString)]>,
    log: Arc<Mutex<LogFile>>,
    say: watch::Sender<State>,
}

impl Keeper {
    async fn keep(self, mut orders: mpsc::UnboundedReceiver<Order>) {
        let (mut pause, mut failures) = (FIRST_PAUSE, 0);
        loop {
            let begun = Instant::now();
            self.say.send_replace(State::Runs);
            let last = match self.live(&mut orders).await {
                Ok(None) => break,
                Ok(Some(status)) => describe(status, &self.last_words()),
                Err(error) => format!("it cannot be started: {error}"),
            };
            if begun.elapsed() > GOOD_LIFE {
                (pause, failures) = (FIRST_PAUSE, 0);
            }
            failures += 1;
            self.say.send_replace(State::Failed(failures, last.clone()));
            let name = self.program.name;
            self.terminal
                .say(&format!("{name} ended: {last}; it is started again in {:.1} s", pause.as_secs_f32()));
            tokio::select! {
                () = sleep(pause) => {}
                Some(_) = orders.recv() => break,
            }
            pause = next_pause(pause);
        }
        self.say.send_replace(State::Stopped);
    }

    /// From its start to its end. None: it was told to stop.
    async fn live(&self, orders: &mut mpsc::UnboundedReceiver<Order>) -> io::Result<Option<ExitStatus>> {
        let mut child = self.spawn()?;
        let (input, output, errors) = (child.stdin.take(), child.stdout.take(), child.stderr.take());
        let guard = match self.program.kind {
            Kind::Role => None,
            Kind::Foreign(signal) => Some(guard(&child, signal)?),
        };
        let follows = [output.map(Output::Out), errors.map(Output::Err)];
        let follows: Vec<_> = follows.into_iter().flatten().map(|output| self.follow(output)).collect();
        let mut told = false;
        let status = loop {
            tokio::select! {
                status = child.wait() => break status?,
                Some(order) = orders.recv() => {
                    told = true;
                    send(&child, match (order, self.program.kind) {
                        (Order::Kill, _) => Signal::KILL,
                        (Order::Stop, Kind::Role) => Signal::TERM,
                        (Order::Stop, Kind::Foreign(signal)) => signal,
                    });
                }
            }
        };
        // What it wrote last may still be in the pipes; a child of its own may hold them open for longer than it lived.
        let _ = timeout(LAST_WORDS, futures::future::join_all(follows)).await;
        drop(input);
        if let Some(mut guard) = guard {
            guard.kill().await?;
        }
        Ok((!told).then_some(status))
    }

    fn last_words(&self) -> String {
        self.log.lock().unwrap_or_else(PoisonError::into_inner).last()
    }

    fn follow(&self, output: Output) -> JoinHandle<()> {
        let (name, terminal, log) = (self.program.name, self.terminal.clone(), self.log.clone());
        tokio::spawn(async move {
            match output {
                Output::Out(output) => terminal.follow(name, &log, output).await,
                Output::Err(output) => terminal.follow(name, &log, output).await,
            }
        })
    }

    /// In a group of its own: an interrupt at the terminal is for this process, which knows the order.
    fn spawn(&self) -> io::Result<Child> {
        let mut command = (self.program.command)();
        command.envs(self.variables.iter().cloned());
        command.process_group(0).stdout(Stdio::piped()).stderr(Stdio::piped());
        match self.program.kind {
            Kind::Role => command.stdin(Stdio::piped()).env(supervised::VARIABLE, "1"),
            Kind::Foreign(_) => command.stdin(Stdio::null()),
        };
        tokio::process::Command::from(command).kill_on_drop(true).spawn()
    }
}

/// A shell that waits for the end of its input, which is the end of this process however it came, and then stops the child.
fn guard(child: &Child, signal: Signal) -> io::Result<Child> {
    let Some(pid) = child.id() else { return Err(io::Error::other("it ended at once")) };
    let mut command = Command::new("/bin/sh");
    command
        .args([
            "-c",
            "read -r _; kill -\"$1\" \"$2\"",
            "guard",
            &signal.as_raw().to_string(),
            &pid.to_string(),
        ])
        .process_group(0)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    tokio::process::Command::from(command).spawn()
}

/// A child has an id for as long as nobody else can have it.
fn send(child: &Child, signal: Signal) {
    let pid = child.id().and_then(|pid| i32::try_from(pid).ok()).and_then(Pid::from_raw);
    if let Some(pid) = pid
        && let Err(error) = kill_process(pid, signal)
    {
        tracing::debug!(%error, "a signal was not taken");
    }
}

fn next_pause(pause: Duration) -> Duration {
    (pause * 2).min(LONGEST_PAUSE)
}

/// Who was killed had no say in it.
fn describe(status: ExitStatus, last_words: &str) -> String {
    use std::os::unix::process::ExitStatusExt;
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit code {code}, {last_words:?}"),
        (None, Some(signal)) => format!("signal {signal}"),
        (None, None) => status.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_half_a_minute() {
        let pauses = std::iter::successors(Some(FIRST_PAUSE), |pause| Some(next_pause(*pause)));
        let seconds: Vec<f32> = pauses.take(10).map(|pause| pause.as_secs_f32()).collect();
        assert_eq!(seconds, [0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 30.0, 30.0]);
    }
}
