//! What the public interface must not have: two types of one name, and types of the libraries that tierline is
//! built on.
//!
//! This reads the source. That a `pub` item can be reached from outside is up to the lint `unreachable_pub`, so
//! here `pub` means public.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use quote::ToTokens;
use syn::{Attribute, Fields, ImplItem, Item, UseTree, Visibility};

/// The libraries whose types an app must not depend on because of tierline.
const HIDDEN: [&str; 4] = ["amq_protocol", "lapin", "sqlx", "ureq"];

/// Where handing over such a type is the point.
const HANDED_OVER: [&str; 6] = [
    "Publish",
    "from_pool",
    "postgres_pool",
    "within",
    "publish_within",
    "publish_many_within",
];

struct Source {
    path: PathBuf,
    items: Vec<Item>,
}

/// All the source, the modules within a file beside their file; without tests and what is hidden.
fn sources() -> Vec<Source> {
    let mut sources = Vec::new();
    let mut folders = vec![Path::new(env!("CARGO_MANIFEST_DIR")).join("src")];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|it| it == "rs") && !path.ends_with("tests.rs") {
                let text = std::fs::read_to_string(&path).unwrap();
                add(syn::parse_file(&text).unwrap().items, &path, &mut sources);
            }
        }
    }
    assert!(sources.len() > 100, "only {} were found", sources.len());
    sources
}

fn add(items: Vec<Item>, path: &Path, sources: &mut Vec<Source>) {
    let mut own = Vec::new();
    for item in items {
        match item {
            Item::Mod(module) if is_left_out(&module.attrs) => {}
            Item::Mod(module) => {
                let items = module.content.map(|(_, items)| items);
                add(items.unwrap_or_default(), path, sources);
            }
            item => own.push(item),
        }
    }
    let path = path.to_owned();
    sources.push(Source { path, items: own });
}

fn is_left_out(attributes: &[Attribute]) -> bool {
    let mut texts = attributes.iter().map(|it| shown(&it.meta));
    texts.any(|text| text == "cfg (test)" || text == "doc (hidden)")
}

fn shown(tokens: &impl ToTokens) -> String {
    tokens.to_token_stream().to_string()
}

fn is_public(visibility: &Visibility) -> bool {
    matches!(visibility, Visibility::Public(_))
}

/// The names of the public types, with the files that define them.
fn public_types(sources: &[Source]) -> BTreeMap<String, Vec<&Path>> {
    let mut types: BTreeMap<String, Vec<&Path>> = BTreeMap::new();
    for source in sources {
        for item in &source.items {
            let (visibility, name) = match item {
                Item::Struct(item) => (&item.vis, &item.ident),
                Item::Enum(item) => (&item.vis, &item.ident),
                Item::Trait(item) => (&item.vis, &item.ident),
                Item::Type(item) => (&item.vis, &item.ident),
                _ => continue,
            };
            if is_public(visibility) {
                let files = types.entry(name.to_string()).or_default();
                files.push(&source.path);
            }
        }
    }
    types
}

#[test]
fn no_two_public_types_have_one_name() {
    let sources = sources();
    let mut types = public_types(&sources);
    assert!(types.len() > 80, "only {} were found", types.len());
    types.retain(|_, files| files.len() > 1);
    assert!(types.is_empty(), "{types:#?}");
}

#[test]
fn no_type_of_lapin_sqlx_or_ureq_is_in_a_public_signature() {
    let sources = sources();
    let public = public_types(&sources);
    let mut found = Vec::new();
    for source in &sources {
        let mut imported: BTreeSet<String> = HIDDEN.map(String::from).into();
        for item in &source.items {
            if let Item::Use(item) = item {
                read_imports(&item.tree, false, &mut imported);
            }
        }
        for (name, signature) in source.items.iter().flat_map(|it| signatures(it, &public)) {
            let mut words = signature.split(|c: char| !c.is_alphanumeric() && c != '_');
            let is_meant = HANDED_OVER.contains(&&*name);
            if !is_meant && words.any(|word| imported.contains(word)) {
                found.push(format!("{}: {name}: {signature}", source.path.display()));
            }
        }
    }
    assert!(found.is_empty(), "{found:#?}");
}

/// Adds the names that an import brings in from a hidden library.
fn read_imports(tree: &UseTree, is_hidden: bool, imported: &mut BTreeSet<String>) {
    match tree {
        UseTree::Path(path) => {
            let is_hidden = is_hidden || HIDDEN.contains(&&*path.ident.to_string());
            read_imports(&path.tree, is_hidden, imported);
        }
        UseTree::Group(group) => {
            for tree in &group.items {
                read_imports(tree, is_hidden, imported);
            }
        }
        UseTree::Name(name) if is_hidden => drop(imported.insert(name.ident.to_string())),
        UseTree::Rename(name) if is_hidden => drop(imported.insert(name.rename.to_string())),
        _ => {}
    }
}

/// The public signatures of an item, by name.
fn signatures(item: &Item, public: &BTreeMap<String, Vec<&Path>>) -> Vec<(String, String)> {
    let fields = |fields: &Fields, is_enum: bool| -> Vec<(String, String)> {
        let fields = fields.iter();
        let fields = fields.filter(|field| is_enum || is_public(&field.vis));
        fields
            .map(|field| (shown(&field.ident), shown(&field.ty)))
            .collect()
    };
    match item {
        Item::Fn(item) if is_public(&item.vis) && !is_left_out(&item.attrs) => {
            vec![(item.sig.ident.to_string(), shown(&item.sig))]
        }
        Item::Struct(item) if is_public(&item.vis) => fields(&item.fields, false),
        Item::Enum(item) if is_public(&item.vis) => {
            let variants = item.variants.iter();
            variants.flat_map(|it| fields(&it.fields, true)).collect()
        }
        Item::Trait(item) if is_public(&item.vis) => {
            vec![(item.ident.to_string(), shown(item))]
        }
        Item::Type(item) if is_public(&item.vis) => vec![(item.ident.to_string(), shown(&item.ty))],
        Item::Impl(item) => {
            let of = shown(&item.self_ty);
            let is_of_public = of
                .split(|c: char| !c.is_alphanumeric())
                .any(|word| public.contains_key(word));
            let implemented = item.trait_.as_ref().filter(|_| is_of_public);
            let implemented = implemented.map(|(path, _)| (of.clone(), shown(path)));
            let methods = item.items.iter().filter_map(|item| match item {
                ImplItem::Fn(method) if is_public(&method.vis) && !is_left_out(&method.attrs) => {
                    Some((method.sig.ident.to_string(), shown(&method.sig)))
                }
                _ => None,
            });
            implemented.into_iter().chain(methods).collect()
        }
        _ => Vec::new(),
    }
}
