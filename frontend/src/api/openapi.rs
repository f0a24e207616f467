//! What `/api/openapi.json` says beside the routes.

use std::collections::BTreeMap;

use harmonia_service::problem::Problem;
use utoipa::openapi::security::{Http, HttpAuthScheme, SecurityScheme};
use utoipa::openapi::{ContentBuilder, OpenApi, Ref, RefOr, Response, ResponseBuilder};
use utoipa::{IntoResponses, Modify, OpenApi as _};

/// The description, without the routes of the API itself.
pub fn frame() -> OpenApi {
    Frame::openapi()
}

#[derive(utoipa::OpenApi)]
#[openapi(
    info(
        title = "harmonia-ci",
        description = "Evaluations, builds, builders, projects and tokens of a harmonia-ci farm. Errors are RFC 9457 problem \
                       documents, whose `detail` is a sentence for people."
    ),
    paths(crate::answer::public_keys, document),
    components(schemas(Problem)),
    modifiers(&Bearer),
    security(("bearer" = []))
)]
struct Frame;

/// This document
#[utoipa::path(get, path = "/api/openapi.json", tag = "api", security(()), responses(
    (status = 200, description = "OpenAPI 3.1", content_type = "application/json", body = serde_json::Value),
))]
#[expect(dead_code, reason = "describes a page that is made when the router is")]
fn document() {}

struct Bearer;

impl Modify for Bearer {
    fn modify(&self, openapi: &mut OpenApi) {
        let mut bearer = Http::new(HttpAuthScheme::Bearer);
        bearer.description =
            Some("A token of `harmonia-ci token create`: read < operate < admin.".to_owned());
        let components = openapi.components.get_or_insert_default();
        components.add_security_scheme("bearer", SecurityScheme::Http(bearer));
    }
}

/// What may be answered instead, to whoever only looks.
pub struct Refusals;
/// What may be answered instead, to whoever changes something.
pub struct Objections;

const LOOKING: [(&str, &str); 5] = [
    ("400", "The request makes no sense"),
    ("401", "No token, or none that is known"),
    ("403", "The token does not allow this"),
    ("404", "There is no such thing"),
    ("503", "The database is away, or there are too many requests: try again"),
];
const CHANGING: [(&str, &str); 4] = [
    ("409", "It does not fit the state in which it is"),
    ("413", "The body is longer than 64 KiB"),
    ("415", "The body is not JSON"),
    ("422", "The body does not fit, or what it asks cannot be"),
];

impl IntoResponses for Refusals {
    fn responses() -> BTreeMap<String, RefOr<Response>> {
        LOOKING.map(problem).into()
    }
}

impl IntoResponses for Objections {
    fn responses() -> BTreeMap<String, RefOr<Response>> {
        LOOKING.into_iter().chain(CHANGING).map(problem).collect()
    }
}

fn problem((status, what): (&str, &str)) -> (String, RefOr<Response>) {
    let content = ContentBuilder::new().schema(Some(Ref::from_schema_name("Problem"))).build();
    let response = ResponseBuilder::new().description(what).content("application/problem+json", content);
    (status.to_owned(), response.build().into())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    /// As the interfaces are written down.
    const PROMISED: &str = "
        GET POST /api/evals
        GET /api/evals/{id}
        POST /api/evals/{id}/cancel
        POST /api/evals/{id}/re-evaluate
        POST /api/evals/{id}/rebuild-failed
        POST DELETE /api/evals/{id}/pin
        GET /api/builds
        GET /api/builds/{id}
        GET /api/builds/{id}/why
        GET /api/builds/{id}/log
        POST /api/builds/{id}/rebuild
        POST /api/builds/{id}/cancel
        GET /api/events
        GET /api/nodes
        POST DELETE /api/nodes/{id}/drain
        GET /api/queue
        GET POST /api/projects
        PATCH DELETE /api/projects/{name}
        GET POST DELETE /api/tokens
        DELETE /api/tokens/{name}
        GET /api/leader
        GET /api/public-keys
        GET /api/openapi.json
    ";

    fn described() -> serde_json::Value {
        serde_json::to_value(crate::api::resources().split_for_parts().1).unwrap()
    }

    #[test]
    fn everything_that_is_promised_is_described_and_nothing_else() {
        let mut promised: Vec<String> = Vec::new();
        for line in PROMISED.lines() {
            let words: Vec<&str> = line.split_whitespace().collect();
            if let [methods @ .., path] = &words[..] {
                promised.extend(methods.iter().map(|method| format!("{method} {path}")));
            }
        }
        let description = described();
        let mut found: Vec<String> = Vec::new();
        for (path, methods) in description["paths"].as_object().unwrap() {
            found.extend(
                methods.as_object().unwrap().keys().map(|method| format!("{} {path}", method.to_uppercase())),
            );
        }
        promised.sort();
        found.sort();
        assert_eq!(found, promised);
    }

    #[test]
    fn everything_has_a_name_of_its_own() {
        let description = described();
        let paths = description["paths"].as_object().unwrap().values();
        let operations = paths.flat_map(|methods| methods.as_object().unwrap().values());
        let names: Vec<&str> =
            operations.map(|operation| operation["operationId"].as_str().unwrap()).collect();
        let different: std::collections::BTreeSet<&str> = names.iter().copied().collect();
        assert_eq!(names.len(), different.len(), "{names:?}");
    }

    #[test]
    fn every_error_is_a_problem_document() {
        for (path, methods) in described()["paths"].as_object().unwrap() {
            for (method, operation) in methods.as_object().unwrap() {
                for (status, response) in operation["responses"].as_object().unwrap() {
                    if status.as_str() >= "400" {
                        let problem = &response["content"]["application/problem+json"];
                        assert!(problem.is_object(), "{method} {path} {status}");
                    }
                }
            }
        }
    }
}
