use tokio::sync::mpsc;

/// What the daemon says while an operation runs. Text is bytes, for builds print what they like.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Message {
    /// A line of the daemon's own log.
    Log(Vec<u8>),
    /// Something begins.
    Start {
        /// Its number, which later messages refer to.
        id: u64,
        /// How important, as in [`super::Verbosity`].
        level: u64,
        /// What it is.
        kind: ActivityKind,
        /// In words.
        text: Vec<u8>,
        /// In facts, depending on the kind.
        fields: Vec<Field>,
        /// Of which activity it is a part, or 0.
        parent: u64,
    },
    /// Something ended.
    Stop {
        /// Its number.
        id: u64,
    },
    /// Something came out of an activity.
    Result {
        /// Its number.
        id: u64,
        /// What came.
        kind: ResultKind,
        /// The facts, depending on the kind.
        fields: Vec<Field>,
    },
}

/// One fact of an activity or a result.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Field {
    /// A number.
    Number(u64),
    /// A string.
    Text(Vec<u8>),
}

/// An enum over numbers of Nix, with room for those that a later Nix adds.
macro_rules! numbers {
    ($(#[$doc:meta])* $name:ident { $($(#[$variant_doc:meta])* $variant:ident = $number:literal,)* }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum $name {
            $($(#[$variant_doc])* $variant,)*
            /// One that is not known here.
            Other(u64),
        }

        impl From<u64> for $name {
            fn from(number: u64) -> Self {
                match number {
                    $($number => Self::$variant,)*
                    other => Self::Other(other),
                }
            }
        }
    };
}
pub(super) use numbers;

numbers! {
    /// What an activity is.
    ActivityKind {
        /// A path is copied from one store to another.
        CopyPath = 100,
        /// A file is fetched.
        FileTransfer = 101,
        /// Paths are built and substituted.
        Realise = 102,
        /// Paths are copied.
        CopyPaths = 103,
        /// Derivations are built.
        Builds = 104,
        /// A derivation is built; the first field is its path.
        Build = 105,
        /// Equal files are linked.
        OptimiseStore = 106,
        /// Paths are verified.
        VerifyPaths = 107,
        /// A path is substituted; the fields are it and the store that has it.
        Substitute = 108,
        /// A store is asked for a path.
        QueryPathInfo = 109,
        /// The hook after a build runs.
        PostBuildHook = 110,
        /// A build waits for a lock or a machine.
        BuildWaiting = 111,
        /// A source is fetched.
        FetchTree = 112,
    }
}

numbers! {
    /// What came out of an activity.
    ResultKind {
        /// A file was linked to an equal one.
        FileLinked = 100,
        /// A line of a build's log.
        BuildLogLine = 101,
        /// A path is not signed by a trusted key.
        UntrustedPath = 102,
        /// A path is corrupt.
        CorruptedPath = 103,
        /// A build enters a phase.
        SetPhase = 104,
        /// How far it is.
        Progress = 105,
        /// How much is expected.
        SetExpected = 106,
        /// A line of the log of the hook after a build.
        PostBuildLogLine = 107,
        /// What a fetch is doing.
        FetchStatus = 108,
    }
}

impl Message {
    /// The line of a build's log in it, if it has one: without its line break, in whatever encoding the build has.
    pub fn log_line(&self) -> Option<&[u8]> {
        match self {
            Self::Result { kind: ResultKind::BuildLogLine, fields, .. } => match fields.as_slice() {
                [Field::Text(line), ..] => Some(line),
                _ => None,
            },
            _ => None,
        }
    }
}

/// Who wants the messages of an operation. The daemon waits while a sink does.
pub trait Sink: Send {
    /// Takes the next one.
    fn take(&mut self, message: Message) -> impl Future<Output = ()> + Send;
}

impl<F: FnMut(Message) + Send> Sink for F {
    async fn take(&mut self, message: Message) {
        self(message);
    }
}

/// Once nobody receives any more, messages are dropped: the operation goes on.
impl Sink for mpsc::Sender<Message> {
    async fn take(&mut self, message: Message) {
        self.send(message).await.ok();
    }
}

/// Nobody in particular: the daemon's own lines go to the debug log.
#[derive(Debug, Clone, Copy)]
pub struct Quiet;

impl Sink for Quiet {
    async fn take(&mut self, message: Message) {
        if let Message::Log(line) = message {
            tracing::debug!(line = %String::from_utf8_lossy(&line).trim_end(), "the Nix daemon says");
        }
    }
}
