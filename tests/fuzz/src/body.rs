use std::collections::BTreeSet;
use std::fmt::Debug;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use harmonia_nix::source::{prove_file, prove_nar};
use harmonia_nix::store_path::{self, StorePath};
use nix_derivation::CAHash;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::protocol::{CompleteAnswer, CompleteRequest, SlotsAnswer, SlotsRequest, Source, Wish};

/// What signers are asked, and what they answer. What is read is what is written.
pub fn read(input: &[u8]) {
    understood::<SlotsAnswer>(input);
    understood::<CompleteAnswer>(input);
    if let Some(request) = understood::<SlotsRequest>(input) {
        for wish in request.wishes {
            match wish {
                Wish::Source { source, .. } => prove(&source),
                Wish::Nar { path, .. }
                | Wish::Parts { path, .. }
                | Wish::Part { path, .. }
                | Wish::Listing { path, .. }
                | Wish::Published { path } => drop(store_path::parse(&path)),
                Wish::Log { .. } => {}
            }
        }
    }
    if let Some(request) = understood::<CompleteRequest>(input) {
        request.sources.iter().for_each(|stored| prove(&stored.source));
        for output in request.results.iter().flat_map(|result| &result.outputs) {
            store_path::parse(&output.path).ok();
            output.ca.as_ref().map(|ca| ca.parse::<CAHash>());
        }
    }
}

fn understood<T: DeserializeOwned + Serialize + PartialEq + Debug>(input: &[u8]) -> Option<T> {
    let value: T = serde_json::from_slice(input).ok()?;
    let text = serde_json::to_vec(&value).expect("it is written");
    assert_eq!(serde_json::from_slice::<T>(&text).expect("it is read again"), value);
    Some(value)
}

/// As signers do, before anybody is asked.
fn prove(source: &Source) {
    let Ok(path) = store_path::parse(&source.path) else { return };
    let references: Result<BTreeSet<StorePath>, _> =
        source.references.iter().map(|reference| store_path::parse(reference)).collect();
    let Ok(references) = references else { return };
    prove_nar(&path, source.nar_hash, &references).ok();
    if let Some(Ok(contents)) = source.text.as_ref().map(|text| STANDARD.decode(text)) {
        prove_file(&path, &contents, source.nar_hash, &references).ok();
    }
}
