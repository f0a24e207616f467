//! The page of the custom resources in docs/reference, made from what the API server gets.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{
    CustomResourceDefinition, JSONSchemaProps, JSONSchemaPropsOrArray, JSONSchemaPropsOrBool,
};
use serde_json::Value;

use crate::all;

/// Fields in Kubernetes' own words, which Kubernetes describes.
const KUBERNETES: [&str; 9] = [
    "affinity",
    "conditions",
    "env",
    "imagePullSecrets",
    "resources",
    "tolerations",
    "topologySpreadConstraints",
    "volumeMounts",
    "volumes",
];

/// Every kind with its fields.
pub fn page() -> String {
    let mut text = "# Custom resources\n\nMade by `harmonia-ci reference crds`; `kubectl explain` knows the same. `harmonia-ci crds` prints the definitions, which also lie in\n\
                    [crds/](../../crds). Examples are in [docs/examples](../examples).\n"
        .to_owned();
    for crd in all() {
        kind(&crd, &mut text);
    }
    text
}

fn kind(crd: &CustomResourceDefinition, text: &mut String) {
    let names = &crd.spec.names;
    let short =
        names.short_names.iter().flatten().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
    *text += &format!("\n## {}\n\n", names.kind);
    for version in &crd.spec.versions {
        let Some(schema) = version.schema.as_ref().and_then(|schema| schema.open_api_v3_schema.as_ref())
        else {
            continue;
        };
        let what = schema.description.as_deref().unwrap_or_default();
        *text += &format!(
            "{what}\n\nGroup and version `{}/{}`, short name {short}.\n\n",
            crd.spec.group, version.name
        );
        *text += "| field | type | default | what it is |\n| --- | --- | --- | --- |\n";
        below("", schema, text);
    }
}

fn below(path: &str, schema: &JSONSchemaProps, text: &mut String) {
    for (name, field) in schema.properties.iter().flatten() {
        let required = schema.required.iter().flatten().any(|required| required == name);
        let path = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
        row(&path, field, required, text);
        if KUBERNETES.contains(&name.as_str()) {
            continue;
        }
        below(&path, field, text);
        if let Some(JSONSchemaPropsOrArray::Schema(items)) = &field.items {
            below(&format!("{path}[]"), items, text);
        }
    }
}

fn row(path: &str, field: &JSONSchemaProps, required: bool, text: &mut String) {
    let default = field.default.as_ref().map(|default| shown(&default.0)).unwrap_or_default();
    let description = field.description.as_deref().unwrap_or_default().replace('\n', " ").replace('|', "\\|");
    let what = match description.split_once(" Default: ") {
        Some((what, _)) => what,
        None => &description,
    };
    let must = if required { ", required" } else { "" };
    *text += &format!("| `{path}` | {}{must} | {default} | {what} |\n", kind_of(field));
}

/// A default in a table. One of an object is that of its fields.
fn shown(default: &Value) -> String {
    match default {
        Value::Array(items) => items.iter().map(shown).collect::<Vec<_>>().join(", "),
        Value::String(text) => format!("`{text}`"),
        Value::Object(_) | Value::Null => String::new(),
        Value::Bool(_) | Value::Number(_) => format!("`{default}`"),
    }
}

fn kind_of(field: &JSONSchemaProps) -> String {
    if let Some(values) = &field.enum_ {
        return values.iter().map(|value| shown(&value.0)).collect::<Vec<_>>().join(", ");
    }
    let kind = field.type_.as_deref().unwrap_or("any");
    match (kind, &field.items, &field.additional_properties) {
        ("array", Some(JSONSchemaPropsOrArray::Schema(items)), _) => format!("list of {}s", kind_of(items)),
        ("object", _, Some(JSONSchemaPropsOrBool::Schema(values))) => format!("map of {}s", kind_of(values)),
        ("integer", ..) => match (field.minimum, field.maximum) {
            (Some(least), Some(most)) => format!("integer, {least} to {most}"),
            _ => kind.to_owned(),
        },
        _ => kind.to_owned(),
    }
}
