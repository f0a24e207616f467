//! What a daemon writes, put together by hand.

pub const MAGIC: u64 = 0x6478_696f;
pub const NEXT: u64 = 0x6f6c_6d67;
pub const READ: u64 = 0x6461_7461;
pub const WRITE: u64 = 0x6461_7416;
pub const LAST: u64 = 0x616c_7473;
pub const ERROR: u64 = 0x6378_7470;
pub const START: u64 = 0x5354_5254;
pub const STOP: u64 = 0x5354_4f50;
pub const RESULT: u64 = 0x5253_4c54;

pub const PATH: &str = "/nix/store/00000000000000000000000000000000-a";

#[derive(Debug, Default, Clone)]
pub struct Bytes(pub Vec<u8>);

impl Bytes {
    pub fn new() -> Self {
        Self::default()
    }

    pub fn n(mut self, number: u64) -> Self {
        self.0.extend(number.to_le_bytes());
        self
    }

    pub fn s(self, string: impl AsRef<[u8]>) -> Self {
        let string = string.as_ref();
        let mut this = self.n(string.len() as u64);
        this.0.extend(string);
        this.0.resize(this.0.len().next_multiple_of(8), 0);
        this
    }

    pub fn list(self, strings: &[&str]) -> Self {
        strings.iter().fold(self.n(strings.len() as u64), Self::s)
    }

    /// The daemon's half of a handshake up to the end of its messages, as its side of that minor version writes it.
    pub fn hello(minor: u64) -> Self {
        let mut bytes = Self::new().n(MAGIC).n(0x100 | minor);
        if minor >= 38 {
            bytes = bytes.list(&["a-feature", "another"]);
        }
        bytes = bytes.s("2.99");
        if minor >= 35 {
            bytes = bytes.n(2);
        }
        bytes
    }

    pub fn error(message: &str) -> Self {
        Self::new().n(ERROR).s("Error").n(0).s("Error").s(message).n(0).n(0)
    }

    pub fn build_result(minor: u8) -> Self {
        let mut bytes = Self::new().n(3).s("\u{1b}[31mfailed\u{1b}[0m").n(1).n(0).n(100).n(160);
        if minor >= 37 {
            bytes = bytes.n(1).n(2_500_000).n(0);
        }
        let json = r#"{"id":"sha256:00!out","outPath":"00000000000000000000000000000000-a","signatures":[]}"#;
        bytes.n(2).s("sha256:00!out").s(json).s("sha256:00!dev").s("{}")
    }

    /// Every message that there is.
    pub fn messages() -> Vec<Self> {
        vec![
            Self::new().n(NEXT).s("a line\n"),
            Self::new().n(START).n(5).n(3).n(105).s("building").n(2).n(1).s(PATH).n(0).n(9).n(4),
            Self::new().n(STOP).n(5),
            Self::new().n(RESULT).n(5).n(105).n(4).n(0).n(1).n(0).n(2).n(0).n(3).n(0).n(4),
            Self::new().n(LAST),
            Self::new().n(ERROR).s("Error").n(0).s("").s("no").n(0).n(1).n(0).s("while trying"),
            Self::new().n(READ).n(100),
            Self::new().n(WRITE).s("data"),
        ]
    }
}
