//! A build that needs nothing, to see whether this node can build at all before it claims anything.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use harmonia_nix::daemon::{BasicDerivation, BasicOutput, Connection, Quiet};
use harmonia_nix::{Sha256, StorePath, store_path};
use thiserror::Error;

use crate::store::StoreError;

const LIMIT: Duration = Duration::from_secs(120);

/// Why this node cannot build.
#[derive(Debug, Error)]
pub enum CanaryError {
    /// The store does not answer.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The daemon answers and cannot build.
    #[error("the Nix daemon cannot build: {0}")]
    Build(String),
}

/// Builds a directory that nobody built before, in whatever sandbox the daemon has, with a program of the daemon's own.
pub async fn sing(connection: &mut Connection) -> Result<(), CanaryError> {
    let random = Sha256::of(uuid::Uuid::now_v7().as_bytes()).nix32();
    let named = |name: &str| -> Result<StorePath, CanaryError> {
        let path = format!("/nix/store/{}-harmonia-ci-canary{name}", &random[..32]);
        store_path::parse(&path).map_err(|error| CanaryError::Build(error.to_string()))
    };
    let (out, drv) = (named("")?, named(".drv")?);
    let variables = [("out", out.to_string()), ("derivations", String::new()), ("manifest", "/none".into())];
    let derivation = BasicDerivation {
        outputs: BTreeMap::from([(
            "out".to_owned(),
            BasicOutput { path: Some(out), ..BasicOutput::default() },
        )]),
        inputs: BTreeSet::new(),
        system: "builtin".to_owned(),
        builder: "builtin:buildenv".to_owned(),
        args: Vec::new(),
        env: variables.into_iter().map(|(name, value)| (name.to_owned(), value.into_bytes())).collect(),
    };
    let result =
        connection.build_derivation(&drv, &derivation, LIMIT, &mut Quiet).await.map_err(StoreError::from)?;
    match result.status.is_success() {
        true => Ok(()),
        false => Err(CanaryError::Build(result.message)),
    }
}
