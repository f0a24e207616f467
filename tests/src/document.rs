//! Examples in documents: what is written there is run.

use std::fs;

/// A fenced block of a document.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Block {
    /// The word behind its fence.
    pub language: String,
    /// What is in it.
    pub text: String,
}

/// All blocks of a file in `docs/`.
pub fn blocks(name: &str) -> Vec<Block> {
    let path = format!("{}/../docs/{name}", env!("CARGO_MANIFEST_DIR"));
    let document = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path}: {error}"));
    let mut blocks = Vec::new();
    let mut lines = document.lines();
    while let Some(line) = lines.next() {
        if let Some(language) = line.strip_prefix("```") {
            let text =
                lines.by_ref().take_while(|line| *line != "```").map(|line| format!("{line}\n")).collect();
            blocks.push(Block { language: language.to_owned(), text });
        }
    }
    blocks
}

/// Those in one language; there must be some.
pub fn examples(name: &str, language: &str) -> Vec<String> {
    let found = blocks(name).into_iter().filter(|block| block.language == language);
    let found: Vec<String> = found.map(|block| block.text).collect();
    assert!(!found.is_empty(), "docs/{name} has no block in {language}");
    found
}
