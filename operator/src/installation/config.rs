//! The installation, as the chart wrote it down.

use std::collections::BTreeMap;

use harmonia_crds::pool::BuilderPoolSpec;
use harmonia_crds::quantity::{Size, Span};
use k8s_openapi::api::core::v1::{ResourceRequirements, Toleration};
use serde::Deserialize;

/// What the chart tells the operator.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Installation {
    /// The release's full name.
    pub name: String,
    /// The image of operator, signer and frontend.
    pub image: String,
    /// The image of builder and evaluator.
    pub builder_image: String,
    /// When images are pulled.
    #[serde(default)]
    pub image_pull_policy: Option<String>,
    /// Names of Secrets.
    #[serde(default)]
    pub image_pull_secrets: Vec<String>,
    /// Who logs in how.
    #[serde(default)]
    pub database: Databases,
    /// Where results are kept.
    pub s3: Bucket,
    /// What results are signed with.
    pub signing: Signing,
    /// Who sends webhooks and is told statuses.
    #[serde(default)]
    pub forges: Vec<Forge>,
    /// Who says who people are. None: they sign in with tokens.
    #[serde(default)]
    pub oidc: Option<Oidc>,
    /// Taints of nodes that are about to go, beside a cordon.
    #[serde(default)]
    pub drain_taints: Vec<String>,
    /// Networks that builds must not reach, beside the clouds' metadata services.
    #[serde(default)]
    pub forbidden: Vec<String>,
    /// Where builders and signers send traces. None: nowhere.
    #[serde(default)]
    pub tracing: Option<Tracing>,
    /// The frontends.
    pub frontend: Frontend,
    /// The signers.
    pub signer: Signer,
    /// The evaluators.
    pub evaluator: Evaluator,
    /// Where the first token goes. None: people make it.
    #[serde(default)]
    pub admin_token: Option<AdminToken>,
    /// A pool to begin with, made once and never changed.
    #[serde(default)]
    pub pool: Option<FirstPool>,
}

/// URLs of the database, by who uses them. Those that are absent are made by the operator, if it has the admin's.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Databases {
    /// May make logins.
    #[serde(default)]
    pub admin: Option<SecretKey>,
    /// The operator's.
    #[serde(default)]
    pub operator: Option<SecretKey>,
    /// The signers'.
    #[serde(default)]
    pub signer: Option<SecretKey>,
    /// The frontends'.
    #[serde(default)]
    pub frontend: Option<SecretKey>,
    /// The evaluators'.
    #[serde(default)]
    pub evaluator: Option<SecretKey>,
}

/// One value of a Secret in the operator's namespace.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct SecretKey {
    /// The Secret's name.
    pub secret: String,
    /// The key in it.
    #[serde(default = "url")]
    pub key: String,
}

fn url() -> String {
    "url".to_owned()
}

/// A bucket.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Bucket {
    /// The S3 server. None: AWS.
    #[serde(default)]
    pub endpoint: Option<String>,
    /// The same as clients outside reach it, where that differs.
    #[serde(default)]
    pub public_endpoint: Option<String>,
    /// Its name.
    pub bucket: String,
    /// Its region.
    #[serde(default)]
    pub region: Option<String>,
    /// The bucket is part of the host name.
    #[serde(default)]
    pub virtual_host: bool,
    /// A Secret with `access-key-id` and `secret-access-key`. None: what the pods' environment offers.
    #[serde(default)]
    pub secret: Option<String>,
}

/// Signing keys.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Signing {
    /// A Secret, each value of which is a key. It is mounted into signers and read by nobody else.
    pub secret: String,
}

/// A forge that the frontends speak with.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Forge {
    /// As its webhooks are addressed.
    pub name: String,
    /// `github`, `gitea` or `forgejo`.
    #[serde(rename = "type")]
    pub kind: String,
    /// Its address. None: github.com's.
    #[serde(default)]
    pub url: Option<String>,
    /// The number of the GitHub App.
    #[serde(default)]
    pub app_id: Option<u64>,
    /// What it calls this farm when people sign in with it. None: they do not.
    #[serde(default)]
    pub client_id: Option<String>,
    /// A Secret with `webhook-secret`, with the App's `private-key` or a `token`, and with `client-secret` if there is a
    /// `client_id`. Only frontends see it.
    pub secret: String,
}

/// How people sign in to the pages by OpenID Connect, and who may do more than look.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Oidc {
    /// The provider's address. None: people sign in with forges only.
    #[serde(default)]
    pub issuer: Option<String>,
    /// What this farm is called there.
    #[serde(default)]
    pub client_id: Option<String>,
    /// A Secret with `client-secret`. None: the provider gave none.
    #[serde(default)]
    pub secret: Option<String>,
    /// Subjects or addresses, of a forge FORGE:LOGIN, of those who may do everything,
    #[serde(default)]
    pub admins: Vec<String>,
    /// of those who may start and stop builds,
    #[serde(default)]
    pub operators: Vec<String>,
    /// and of those who may look.
    #[serde(default)]
    pub readers: Vec<String>,
}

/// The first token.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct AdminToken {
    /// The Secret to put it into, as `token`.
    pub secret: String,
}

/// A collector of traces.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Tracing {
    /// Its URL, to which OTLP's paths are added.
    pub endpoint: String,
}

/// The pool to begin with.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct FirstPool {
    /// Its name.
    pub name: String,
    /// As people would write it.
    pub spec: BuilderPoolSpec,
}

/// The signers.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Signer {
    /// How many.
    pub replicas: i32,
    /// Of each.
    #[serde(default)]
    pub resources: ResourceRequirements,
    /// Where they run.
    #[serde(default)]
    pub node_selector: BTreeMap<String, String>,
    /// What they tolerate.
    #[serde(default)]
    pub tolerations: Vec<Toleration>,
    /// How often one of them sweeps the bucket, in their own words, such as `1d`;
    #[serde(default)]
    pub sweep_every: Option<String>,
    /// how long what nobody needs stays there;
    #[serde(default)]
    pub sweep_grace: Option<String>,
    /// and the logs of single attempts.
    #[serde(default)]
    pub log_retention: Option<String>,
}

/// The frontends.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Frontend {
    /// How many.
    pub replicas: i32,
    /// Of each.
    #[serde(default)]
    pub resources: ResourceRequirements,
    /// Where they run.
    #[serde(default)]
    pub node_selector: BTreeMap<String, String>,
    /// What they tolerate.
    #[serde(default)]
    pub tolerations: Vec<Toleration>,
    /// Where builders reach them.
    pub url: String,
    /// Where people do, if not there.
    #[serde(default)]
    pub public_url: Option<String>,
    /// Whoever only looks needs no token.
    #[serde(default)]
    pub anonymous_read: bool,
}

/// The evaluators.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Evaluator {
    /// How many.
    pub replicas: i32,
    /// Of each.
    #[serde(default)]
    pub resources: ResourceRequirements,
    /// Where they run.
    #[serde(default)]
    pub node_selector: BTreeMap<String, String>,
    /// What they tolerate.
    #[serde(default)]
    pub tolerations: Vec<Toleration>,
    /// Of the daemon beside each, which only fetches and keeps what is evaluated.
    #[serde(default)]
    pub daemon_resources: ResourceRequirements,
    /// Evaluations at once in one of them.
    #[serde(default)]
    pub workers: Option<i32>,
    /// What an evaluation may take.
    #[serde(default)]
    pub memory: Option<Size>,
    /// How long it may take.
    #[serde(default)]
    pub timeout: Option<Span>,
    /// Private networks that evaluations may reach.
    #[serde(default)]
    pub networks: Vec<String>,
    /// Binary caches whose results are not built again,
    #[serde(default)]
    pub substituters: Vec<String>,
    /// and the keys whose signatures count there.
    #[serde(default)]
    pub trusted_public_keys: Vec<String>,
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
pub(crate) mod tests {
    use super::*;

    /// As the chart writes it for a quickstart.
    pub const TEXT: &str = "
name: harmonia-ci
image: localhost/harmonia-ci:test
builderImage: localhost/harmonia-ci-builder:test
imagePullPolicy: IfNotPresent
imagePullSecrets: [registry]
database:
  admin: {secret: harmonia-ci-postgres, key: url}
s3: {endpoint: 'http://harmonia-ci-s3:9000', publicEndpoint: null, bucket: harmonia-ci, region: us-east-1, virtualHost: false, secret: harmonia-ci-s3}
signing: {secret: harmonia-ci-signing}
forges: [{name: github, type: github, appId: 1234567, clientId: farm, secret: app}, {name: code, type: gitea, url: 'https://code.example.org', secret: code-bot}]
oidc: {issuer: 'https://id.example.org', clientId: farm, secret: sign-in, admins: [ada@example.org, bob@example.org]}
frontend: {replicas: 2, resources: {}, url: 'http://harmonia-ci-frontend.ci.svc', publicUrl: 'https://ci.example.org', anonymousRead: false, nodeSelector: {}, tolerations: []}
signer: {replicas: 2, resources: {requests: {cpu: 100m}}, nodeSelector: {disk: fast}, tolerations: [{key: ci, operator: Exists}], sweepEvery: 12h, sweepGrace: 2d}
evaluator: {replicas: 1, resources: {}, daemonResources: {limits: {memory: 1Gi}}, workers: 1, memory: 4Gi, timeout: 30m, networks: [10.1.2.0/24, 'fd00::/8'], substituters: ['https://cache.example.org'], trustedPublicKeys: ['cache.example.org-1:AAAA']}
adminToken: {secret: harmonia-ci-admin-token}
pool: {name: default, spec: {systems: [x86_64-linux], store: {mode: EmptyDir}}}
";

    /// The same, read.
    pub fn installation() -> Installation {
        serde_saphyr::from_str(TEXT).unwrap()
    }

    #[test]
    fn what_the_chart_writes_is_read() {
        let read = installation();
        assert_eq!(read.database.admin.unwrap().secret, "harmonia-ci-postgres");
        assert_eq!(read.evaluator.memory, Some(Size(4 << 30)));
        assert_eq!(read.signer.tolerations[0].key.as_deref(), Some("ci"));
        assert_eq!(read.pool.unwrap().spec.systems, ["x86_64-linux"]);
    }

    #[test]
    fn a_word_that_means_nothing_is_an_error() {
        for wrong in [TEXT.replace("anonymousRead", "anonymous"), format!("{TEXT}\nsingers: 1\n")] {
            assert!(serde_saphyr::from_str::<Installation>(&wrong).is_err());
        }
    }
}
