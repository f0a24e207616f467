//! Lists the migrations, so that a new file in `migrations/` is embedded without a list to keep.

use std::{collections::BTreeMap, env, error::Error, fmt::Write, fs, path::Path};

fn main() -> Result<(), Box<dyn Error>> {
    let directory = Path::new(&env::var("CARGO_MANIFEST_DIR")?).join("../migrations");
    println!("cargo::rerun-if-changed={}", directory.display());

    let mut files = BTreeMap::new();
    for entry in fs::read_dir(&directory)? {
        let path = entry?.path().canonicalize()?;
        let Some(name) = path.file_name().and_then(|name| name.to_str()) else {
            continue;
        };
        if !name.ends_with(".sql") {
            continue;
        }
        let version: i64 = name
            .split_once('_')
            .and_then(|(digits, _)| digits.parse().ok())
            .ok_or_else(|| format!("{name}: a migration is named like 0001_verb_noun.sql"))?;
        if let Some((other, _)) = files.insert(version, (name.to_owned(), path.clone())) {
            return Err(format!("{name} and {other} have the same number").into());
        }
    }

    let mut list = String::from("&[\n");
    for (version, (name, path)) in files {
        let description = name.trim_end_matches(".sql").split_once('_').map_or("", |(_, words)| words);
        let description = description.replace('_', " ");
        writeln!(
            list,
            "    File {{ version: {version}, name: {name:?}, description: {description:?}, sql: include_str!({path:?}) }},"
        )?;
    }
    list.push(']');
    fs::write(Path::new(&env::var("OUT_DIR")?).join("migrations.rs"), list)?;
    Ok(())
}
