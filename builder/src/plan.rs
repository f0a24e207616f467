//! What a claim asks for.

use harmonia_nix::daemon::BasicDerivation;
use harmonia_nix::resolve::{ResolveError, resolve};
use harmonia_nix::store_path::{self, PathError, StorePath};
use harmonia_queue::builder::{Claim, Input};
use nix_derivation::{ContentAddressMethod, Derivation, HashAlgorithm, Output};
use thiserror::Error;

/// Why a claim cannot be built, whoever tries.
#[derive(Debug, Error)]
pub enum Unbuildable {
    #[error("the claim names no derivation")]
    Path(#[from] PathError),
    #[error("the derivation's text cannot be read")]
    Text(#[from] nix_derivation::Error),
    #[error("impure derivations (__impure) are not built here: their results cannot be shared")]
    Impure,
    #[error(
        "its output {0} is content-addressed otherwise than by the SHA-256 of a NAR: no signer could prove it"
    )]
    Unprovable(String),
    #[error(transparent)]
    Unresolved(#[from] ResolveError),
}

/// What is to be built.
pub struct Plan {
    /// The derivation's path.
    pub drv: StorePath,
    /// The derivation, which needs no other.
    pub derivation: BasicDerivation,
    /// What it reads.
    pub inputs: Vec<StorePath>,
    /// Whether its outputs have fixed hashes.
    pub fetches: bool,
}

/// What a claim asks for, as a daemon is told it.
pub fn plan(claim: &Claim) -> Result<Plan, Unbuildable> {
    let drv = store_path::parse(&claim.drv_path)?;
    let name = drv.name().strip_suffix(".drv").unwrap_or(drv.name());
    let derivation = Derivation::from_aterm_bytes(&claim.aterm, name)?;
    for (name, output) in derivation.outputs() {
        match output {
            Output::Impure { .. } => return Err(Unbuildable::Impure),
            Output::Floating { method: ContentAddressMethod::Nar, hash_algorithm: HashAlgorithm::Sha256 } => {
            }
            Output::Floating { .. } => return Err(Unbuildable::Unprovable(name.clone())),
            _ => {}
        }
    }
    let fetches = derivation.outputs().values().any(|output| matches!(output, Output::Fixed { .. }));
    let derivation = resolve(&derivation, |drv, output| {
        let is = |input: &&Input| input.output == output && input.drv_path == drv.to_string();
        let path = claim.inputs.iter().find(is).and_then(|input| input.path.as_deref());
        path.and_then(|path| store_path::parse(path).ok())
    })?;
    let inputs = derivation.inputs.iter().cloned().collect();
    Ok(Plan { drv, derivation, inputs, fetches })
}
