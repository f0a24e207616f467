//! Lists of a bucket. s3s-fs looks at every object for every page; here only names are read, and of the page's objects the rest.

use std::fs::DirEntry;
use std::io;
use std::path::{Component, Path};

use s3s::dto::*;

/// An object, or what several have in common up to the delimiter.
enum Name {
    Object(String),
    Common(String),
}

impl Name {
    fn text(&self) -> &str {
        let (Self::Object(text) | Self::Common(text)) = self;
        text
    }
}

/// One page. The only delimiter is that of directories.
pub fn list(bucket: &Path, input: ListObjectsV2Input) -> io::Result<ListObjectsV2Output> {
    let prefix = input.prefix.as_deref().unwrap_or_default();
    let after = input.continuation_token.as_deref().max(input.start_after.as_deref()).unwrap_or_default();
    let mut names = names(bucket, prefix, input.delimiter.is_some())?;
    names.retain(|name| name.text() > after);
    names.sort_unstable_by(|one, other| one.text().cmp(other.text()));
    let most = input.max_keys.unwrap_or(1000).clamp(0, 1000);
    let room = usize::try_from(most).unwrap_or(0);
    let is_truncated = room > 0 && names.len() > room;
    names.truncate(room);
    let last = names.last().map(|name| name.text().to_owned());
    let key_count = i32::try_from(names.len()).ok();
    let (mut contents, mut common_prefixes) = (Vec::new(), Vec::new());
    for name in names {
        match name {
            Name::Object(key) => contents.extend(object(bucket, key)?),
            Name::Common(prefix) => common_prefixes.push(CommonPrefix { prefix: Some(prefix) }),
        }
    }
    Ok(ListObjectsV2Output {
        key_count,
        max_keys: Some(most),
        is_truncated: Some(is_truncated),
        contents: Some(contents),
        common_prefixes: Some(common_prefixes),
        next_continuation_token: last.filter(|_| is_truncated),
        continuation_token: input.continuation_token,
        delimiter: input.delimiter,
        encoding_type: input.encoding_type,
        name: Some(input.bucket),
        prefix: input.prefix,
        start_after: input.start_after,
        ..ListObjectsV2Output::default()
    })
}

/// Names that begin so, in no order.
fn names(bucket: &Path, prefix: &str, flat: bool) -> io::Result<Vec<Name>> {
    let above = prefix.rsplit_once('/').map_or("", |(above, _)| above);
    if !Path::new(above).components().all(|part| matches!(part, Component::Normal(_))) {
        // No object has such a name.
        return Ok(Vec::new());
    }
    let mut names = Vec::new();
    let mut directories = vec![above.to_owned()];
    while let Some(directory) = directories.pop() {
        for entry in entries(&bucket.join(&directory))? {
            let entry = entry?;
            let Ok(name) = entry.file_name().into_string() else { continue };
            let key = if directory.is_empty() { name } else { format!("{directory}/{name}") };
            if !key.starts_with(prefix) {
                continue;
            }
            match (entry.file_type()?.is_dir(), flat) {
                (false, _) => names.push(Name::Object(key)),
                (true, false) => directories.push(key),
                (true, true) if holds_any(&entry.path())? => names.push(Name::Common(key + "/")),
                (true, true) => {}
            }
        }
    }
    Ok(names)
}

/// Whether there is an object below a directory.
fn holds_any(directory: &Path) -> io::Result<bool> {
    for entry in entries(directory)? {
        let entry = entry?;
        if !entry.file_type()?.is_dir() || holds_any(&entry.path())? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// What a directory holds: nothing, if it is not there or not any more.
fn entries(directory: &Path) -> io::Result<impl Iterator<Item = io::Result<DirEntry>> + use<>> {
    let entries = match std::fs::read_dir(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        entries => Some(entries?),
    };
    Ok(entries.into_iter().flatten())
}

/// None: it has gone meanwhile.
fn object(bucket: &Path, key: String) -> io::Result<Option<Object>> {
    let metadata = match std::fs::metadata(bucket.join(&key)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        metadata => metadata?,
    };
    Ok(Some(Object {
        key: Some(key),
        last_modified: Some(metadata.modified()?.into()),
        size: i64::try_from(metadata.len()).ok(),
        ..Object::default()
    }))
}
