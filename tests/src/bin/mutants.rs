//! Mutants of the SQL: for each tag in `migrations/` one altered file, against which the tests that `docs/queue.md` names for
//! it must fail.
//!
//! * `-- fence: NAME`: the last condition of that line is left out (an `OR` or an `IF` never holds, anything else always
//!   does; an assignment is dropped).
//! * `-- event: NAME`: what the statement tells the resolver goes into a table that nobody reads.
//! * `-- lock: NAME`: the row lock of that line is not taken.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::sync::Mutex;
use std::thread;

/// Mutants that behave as the original does, and why.
const EQUIVALENT: &[(&str, &str)] = &[
    (
        "missing_is_judged",
        "the report itself holds the job, and the signer's answer has it looked at: the event only chooses its watch earlier",
    ),
    (
        "removed_project_reranks",
        "the evaluations that end with the project take its jobs out of its lanes; the next fold removes the empty turn",
    ),
];

/// Where the events of a mutant go.
const VOID: &str = "\nCREATE TABLE ci.void_event (kind \"char\", subject bigint);\nCREATE TABLE ci.void_passed_over (job_id bigint PRIMARY KEY);\n";
const FIRST: &str = "0001_create_tables.sql";

struct Tag {
    kind: String,
    name: String,
    file: String,
    line: usize,
}

fn main() -> ExitCode {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the workspace");
    let sources = read_migrations(&root.join("migrations"));
    let tags = find_tags(&sources);
    let table = read_table(&fs::read_to_string(root.join("docs/queue.md")).expect("docs/queue.md"));
    let binary = build_tests();
    let mut complaints = untagged(&sources);
    complaints.extend(compare(&tags, &table, &list_tests(&binary)));
    if !complaints.is_empty() {
        complaints.iter().for_each(|complaint| println!("{complaint}"));
        return ExitCode::FAILURE;
    }

    let only: Vec<String> = std::env::args().skip(1).collect();
    let chosen: Vec<&Tag> = tags.iter().filter(|tag| only.is_empty() || only.contains(&tag.name)).collect();
    let queue = Mutex::new(chosen.iter());
    let verdicts = Mutex::new(BTreeMap::<&str, usize>::new());
    thread::scope(|scope| {
        for _ in 0..thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(|| {
                loop {
                    let Some(tag) = queue.lock().expect("the queue").next() else { return };
                    let verdict = try_mutant(tag, &sources, &table[&tag.name], &binary);
                    let mut verdicts = verdicts.lock().expect("the verdicts");
                    *verdicts.entry(verdict).or_default() += 1;
                    let done: usize = verdicts.values().sum();
                    println!("[{done}/{}] {} {} {}: {verdict}", chosen.len(), tag.file, tag.kind, tag.name);
                }
            });
        }
    });
    let verdicts = verdicts.into_inner().expect("the verdicts");
    let count = |verdict| verdicts.get(verdict).copied().unwrap_or_default();
    let survived = chosen.len() - count("killed") - count("equivalent");
    println!("{} killed, {} equivalent, {survived} survived", count("killed"), count("equivalent"));
    if survived == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn read_migrations(directory: &Path) -> BTreeMap<String, String> {
    let files = fs::read_dir(directory).expect("migrations").map(|entry| entry.expect("a file").path());
    let name = |path: &PathBuf| path.file_name().expect("a name").to_string_lossy().into_owned();
    files.map(|path| (name(&path), fs::read_to_string(&path).expect("text"))).collect()
}

fn find_tags(sources: &BTreeMap<String, String>) -> Vec<Tag> {
    let mut tags = Vec::new();
    for (file, text) in sources {
        for (line, content) in text.lines().enumerate() {
            let Some((_, comment)) = content.rsplit_once("-- ") else { continue };
            let Some((kind, name)) = comment.split_once(": ") else { continue };
            if ["fence", "event", "lock"].contains(&kind) && !content.trim_start().starts_with("--") {
                tags.push(Tag { kind: kind.into(), name: name.trim().into(), file: file.clone(), line });
            }
        }
    }
    tags
}

/// Statements that tell the resolver something, or lock rows, and are not said to.
fn untagged(sources: &BTreeMap<String, String>) -> Vec<String> {
    let mut complaints = Vec::new();
    for (file, text) in sources {
        let mut open = None;
        for (n, line) in text.lines().enumerate() {
            if lock_clause(code(line)).is_some() && !line.contains("-- lock: ") {
                complaints.push(format!("{file}:{}: a lock without a tag", n + 1));
            }
            if line.contains("INSERT INTO ci.event") || line.contains("INSERT INTO ci.passed_over") {
                open = Some(n + 1);
            }
            if line.contains("-- event: ") {
                open = None;
            } else if let Some(at) = open.filter(|_| line.trim_end().ends_with(';')) {
                complaints.push(format!("{file}:{at}: an event without a tag"));
                open = None;
            }
        }
    }
    complaints
}

/// The rows of the table *property, test, tags*: for each tag its tests.
fn read_table(text: &str) -> BTreeMap<String, BTreeSet<String>> {
    let mut table = BTreeMap::<String, BTreeSet<String>>::new();
    for row in text.lines().filter(|line| line.starts_with("| ") && line.contains("::")) {
        let cells: Vec<&str> = row.trim_matches('|').split('|').collect();
        let [_, tests, tags] = cells[..] else { continue };
        for tag in quoted(tags) {
            table.entry(tag).or_default().extend(quoted(tests));
        }
    }
    table
}

fn quoted(cell: &str) -> Vec<String> {
    cell.split('`').skip(1).step_by(2).map(str::to_owned).collect()
}

fn compare(
    tags: &[Tag],
    table: &BTreeMap<String, BTreeSet<String>>,
    tests: &BTreeSet<String>,
) -> Vec<String> {
    let mut complaints = Vec::new();
    let mut seen = BTreeSet::new();
    for tag in tags {
        if !seen.insert(tag.name.as_str()) {
            complaints.push(format!("{}:{}: the tag {} is there twice", tag.file, tag.line + 1, tag.name));
        }
        if !table.contains_key(&tag.name) {
            complaints.push(format!("{}:{}: no test is named for {}", tag.file, tag.line + 1, tag.name));
        }
    }
    for (tag, named) in table {
        if !seen.contains(tag.as_str()) {
            complaints.push(format!("docs/queue.md: there is no tag {tag}"));
        }
        complaints.extend(
            named.difference(tests).map(|test| format!("docs/queue.md: there is no test {test} (of {tag})")),
        );
    }
    complaints
}

fn build_tests() -> PathBuf {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut build = Command::new(cargo);
    build.args(["test", "--workspace", "--test", "postgres", "--no-run", "--message-format=json"]);
    // What `cargo run` says of this package would have ring, and all that stands on it, compiled anew.
    let told = |name: &str| name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_");
    for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_str().is_some_and(told)) {
        build.env_remove(name);
    }
    let output = build.stderr(Stdio::inherit()).output().expect("run cargo");
    let messages = String::from_utf8_lossy(&output.stdout).into_owned();
    let executable = messages.lines().find_map(|line| {
        let message: serde_json::Value = serde_json::from_str(line).ok()?;
        let named = message["target"]["name"] == "postgres";
        message["executable"].as_str().filter(|_| named).map(PathBuf::from)
    });
    executable.expect("the tests are built")
}

fn list_tests(binary: &Path) -> BTreeSet<String> {
    let output = Command::new(binary).args(["--list", "--format=terse"]).output().expect("list the tests");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    text.lines().filter_map(|line| line.strip_suffix(": test")).map(str::to_owned).collect()
}

fn try_mutant(
    tag: &Tag,
    sources: &BTreeMap<String, String>,
    tests: &BTreeSet<String>,
    binary: &Path,
) -> &'static str {
    let directory = tempfile::tempdir().expect("a directory");
    let write = |file: &str, text: &str| fs::write(directory.path().join(file), text).expect("write");
    let Some(mutant) = mutate(tag, &sources[&tag.file]) else { return "survived: the rule does not fit" };
    let with_void = |text: &str| format!("{text}{VOID}");
    if tag.kind == "event" && tag.file != FIRST {
        write(FIRST, &with_void(&sources[FIRST]));
    }
    write(&tag.file, &mutant);
    let output = Command::new(binary)
        .args(["--exact", "--test-threads=2"])
        .args(tests)
        .env("HARMONIA_CI_TEST_MIGRATIONS", directory.path())
        .env("RUST_BACKTRACE", "0")
        .output()
        .expect("run the tests");
    if String::from_utf8_lossy(&output.stdout).contains("migrate the template") {
        return "survived: it is no SQL";
    }
    match (output.status.success(), EQUIVALENT.iter().any(|(name, _)| *name == tag.name)) {
        (false, _) => "killed",
        (true, true) => "equivalent",
        (true, false) => "survived",
    }
}

fn mutate(tag: &Tag, text: &str) -> Option<String> {
    let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
    let line = lines[tag.line].clone();
    let (at, replacement) = match tag.kind.as_str() {
        "fence" => (tag.line, open_fence(code(&line))?),
        "lock" => (tag.line, drop_lock(code(&line))?),
        _ => {
            let insert = |line: &String| {
                line.contains("INSERT INTO ci.event") || line.contains("INSERT INTO ci.passed_over")
            };
            let at = (0..=tag.line).rev().find(|&at| insert(&lines[at]))?;
            let void = lines[at]
                .replace("INSERT INTO ci.event", "INSERT INTO ci.void_event")
                .replace("INSERT INTO ci.passed_over", "INSERT INTO ci.void_passed_over");
            (at, void)
        }
    };
    lines[at] = replacement;
    Some(lines.join("\n") + "\n")
}

/// A line without its comment.
fn code(line: &str) -> &str {
    line.find("--").map_or(line, |at| &line[..at]).trim_end()
}

/// Where a line's lock clause begins.
fn lock_clause(line: &str) -> Option<usize> {
    ["FOR UPDATE", "FOR NO KEY UPDATE", "FOR KEY SHARE", "FOR SHARE"].iter().find_map(|lock| line.find(lock))
}

fn drop_lock(line: &str) -> Option<String> {
    let start = lock_clause(line)?;
    let rest = &line[start..];
    let end = rest.find([')', ';']).unwrap_or(rest.len());
    Some(format!("{}{}", &line[..start], &rest[end..]))
}

/// Leaves out the line's last condition that is not inside parentheses.
fn open_fence(line: &str) -> Option<String> {
    if line.contains(":=") {
        return Some(String::new());
    }
    let mut depth = 0;
    let mut condition = None;
    for (at, character) in line.char_indices() {
        match character {
            '(' => depth += 1,
            ')' => depth -= 1,
            _ if depth == 0 && line[..at].chars().last().is_none_or(char::is_whitespace) => {
                let keyword =
                    ["WHERE ", "AND ", "OR ", "IF "].into_iter().find(|word| line[at..].starts_with(word));
                condition = keyword.map(|word| (at + word.len(), word)).or(condition);
            }
            _ => {}
        }
    }
    let (start, keyword) = condition?;
    let value = if ["OR ", "IF "].contains(&keyword) { "false" } else { "true" };
    Some(format!("{}{value}{}", &line[..start], &line[start + end_of_condition(&line[start..])..]))
}

fn end_of_condition(text: &str) -> usize {
    let mut depth = 0;
    for (at, character) in text.char_indices() {
        match character {
            '(' => depth += 1,
            ')' if depth == 0 => return at,
            ')' => depth -= 1,
            ';' => return at,
            ' ' if depth == 0 && text[at..].starts_with(" THEN") => return at,
            _ => {}
        }
    }
    text.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fence_loses_its_last_condition() {
        let cases = [
            ("    AND r.session_id = p_session;", "    AND true;"),
            ("  AND (a IS NULL OR b <> f(c))", "  AND true"),
            ("     OR g.path <> e.path)", "     OR false)"),
            ("  IF -1 = ANY (v_depths) THEN", "  IF false THEN"),
            ("  FROM f(a, b) WHERE phase <> 'accepted';", "  FROM f(a, b) WHERE true;"),
            ("  v_left := least(v_left, v_free);", ""),
        ];
        for (line, mutant) in cases {
            assert_eq!(open_fence(line).as_deref(), Some(mutant));
        }
    }

    #[test]
    fn a_lock_is_left_out_to_the_end_of_its_clause() {
        let cases = [
            ("  PERFORM FROM ci.gate FOR KEY SHARE;", "  PERFORM FROM ci.gate ;"),
            ("      ORDER BY m.n LIMIT 1 FOR UPDATE SKIP LOCKED) x;", "      ORDER BY m.n LIMIT 1 ) x;"),
            (
                "  IF c THEN PERFORM FROM ci.gate FOR UPDATE; END IF;",
                "  IF c THEN PERFORM FROM ci.gate ; END IF;",
            ),
        ];
        for (line, mutant) in cases {
            assert_eq!(drop_lock(line).as_deref(), Some(mutant));
        }
    }
}
